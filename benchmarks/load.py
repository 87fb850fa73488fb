"""What many clients, many images and many rounds cost: python -m benchmarks.load

    --only clients rounds       some of the cases; the record keeps the others as they are
    --rounds 2000               of the long run, in place of 10,000
    --record FILE               in place of results/bench/load.json
    --render                    only write the table of docs/performance.md anew

Each case is played in a process of its own, whose peak memory is then its own: 500 and 1,000 clients of 50 images (125
and 250 with Orchestra, whose server has more to do), one client with 100,000 and 200,000 images, 10,000 rounds of a
model with three parameters, which are about everything else that a round does. Growth is told in processor seconds,
which depend little on who else uses the machine.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import fedu2
from fedu2.aggregators import aggregators
from fedu2.data import Dataset, ImageSet, datasets
from fedu2.experiment import Experiment
from fedu2.federation.callbacks import Callback
from fedu2.files import write_atomically
from fedu2.methods import Method, method
from fedu2.objectives import Objective, Outcome, objectives
from fedu2.seeds import generator

ROOT = Path(__file__).parents[1]
RECORD = ROOT / "results" / "bench" / "load.json"
PAGE = ROOT / "docs" / "performance.md"
MARKERS = "<!-- load: python -m benchmarks.load --render -->\n", "<!-- end of load -->\n"
BLOCK = 500  # rounds between two looks at memory and handles
TINY = {"encoder": "tiny", "width": 4, "partition": "iid", "local_epochs": 1, "engine.threads": 1, "device": "cpu"}


class Theta(nn.Module):
    """Three parameters."""

    features = 3

    def __init__(self) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.value + x.mean((2, 3))


@objectives.register("colour")
class Colour(Objective):
    """ℓ = ½‖θ − c‖² with c the mean colour of the first view: as little to compute as a round can have."""

    def __init__(self, encoder: nn.Module, experiment: Experiment) -> None:
        super().__init__()
        self.encoder, self.projector = Theta(), nn.Identity()

    def forward(self, view1: Tensor, view2: Tensor) -> Outcome:
        h1, h2 = self.encoder(view1), self.encoder(view2)
        loss = (self.encoder.value - view1.mean((0, 2, 3))).square().sum() / 2
        return Outcome(loss, (h1, h2), (h1, h2))


@method("colour", objectives=("colour",), reference="none")
def colour(experiment: Experiment) -> Method:
    """The model of three parameters, averaged."""
    return Method(experiment, aggregators["fedavg"](experiment))


def noise_images(count: int, size: int) -> str:
    """The name of a data set of `count` images of noise in ten classes; a hundred more to test by."""
    name = f"noise-{count}-{size}"

    @datasets.register(name)
    def load(_: object) -> Dataset:
        draw = generator("cpu", 0, name)
        train, test = (
            ImageSet(
                torch.randint(256, (n, 3, size, size), dtype=torch.uint8, generator=draw),
                torch.arange(n) % 10,
            )
            for n in (count, 100)
        )
        return Dataset(name, train, test, tuple("0123456789"))

    return name


class Meter(Callback):
    """Seconds of a block of rounds, memory and open files after it."""

    def __init__(self, block: int = 1) -> None:
        self.block, self.blocks = block, list[dict[str, float]]()

    def on_round(self, record: Mapping[str, Any]) -> None:
        if record["round"] % self.block == 0:
            self.blocks.append(_now(record["round"]))

    def spans(self, of: str) -> list[float]:
        """What each block took."""
        return [after[of] - before[of] for before, after in itertools.pairwise(self.blocks)]


def _now(round_: int) -> dict[str, float]:
    with open("/proc/self/statm") as file:
        resident = int(file.read().split()[1]) * resource.getpagesize()
    handles = len(os.listdir("/proc/self/fd"))
    clocks = {"seconds": time.perf_counter(), "cpu": time.process_time()}
    return {"round": round_, **clocks, "resident_mb": resident / 1e6, "handles": handles}


def play(settings: Mapping[str, Any], block: int = 1) -> dict[str, Any]:
    """One run in a temporary folder."""
    before, meter = _now(0), Meter(block)
    with tempfile.TemporaryDirectory(prefix="fedu2-load-") as folder:
        run = fedu2.train(Experiment.parse(settings), Path(folder) / "run", callbacks=[meter])
        # What checkpoints hold beside the model of the server, and what a round wrote to the log.
        held = sum(path.stat().st_size for path in (run.path / "checkpoint").rglob("*") if path.is_file())
        training = [record["seconds"] for record in run.history if record["round"] > 0]
    rounds = int(meter.blocks[-1]["round"])
    return {
        "settings": dict(settings),
        "rounds": rounds,
        "training_seconds": sum(training) / rounds,  # a round, without evaluation and files
        "round_seconds": sum(meter.spans("seconds")) / rounds,
        "round_cpu": sum(meter.spans("cpu")) / rounds,
        "before_mb": before["resident_mb"],
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6,
        "checkpoints_mb": held / 1e6,
        "blocks": [{key: round(value, 3) for key, value in block.items()} for block in meter.blocks],
    }


def _clients(method: str, clients: int) -> dict[str, Any]:
    return play(
        TINY | {"dataset": noise_images(50 * clients, 16), "data.image_size": 16, "method": method, "clients": clients,
                "batch_size": 50, "rounds": 2, "evaluation.every": 0, **TARGETS.get(method, {})}
    )  # fmt: skip


def _images(images: int) -> dict[str, Any]:
    return play(
        TINY | {"dataset": noise_images(images, 32), "method": "fedu2", "clients": 1, "batch_size": 256, "rounds": 1,
                "evaluation.every": 0}
    )  # fmt: skip


def _rounds(rounds: int) -> dict[str, Any]:
    return play(
        TINY | {"dataset": noise_images(8, 8), "data.image_size": 8, "method": "colour",
                "clients": 2, "batch_size": 4, "views.recipe": "none", "views.crop_scale": None, "rounds": rounds,
                "evaluation.every": 0},
        BLOCK,
    )  # fmt: skip


TARGETS = {"fedu2": {"byol.target": "shared"}}  # clients that remember nothing; a method's own choice otherwise
CLIENTS = {"fedbyol": (500, 1000), "fedema": (500, 1000), "fedu2": (500, 1000), "orchestra": (125, 250)}
CASES: dict[str, Callable[[int], dict[str, Any]]] = {
    **{f"clients {method} {n}": lambda _, m=method, n=n: _clients(m, n)
       for method, sizes in CLIENTS.items() for n in sizes},
    **{f"images {n}": lambda _, n=n: _images(n) for n in (100_000, 200_000)},
    "rounds": _rounds,
}  # fmt: skip


def main() -> None:
    """Measure, record, write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[""], help="cases whose names begin so")
    parser.add_argument("--rounds", type=int, default=10_000)
    parser.add_argument("--record", type=Path, default=RECORD)
    parser.add_argument("--render", action="store_true")
    parser.add_argument("--case", help=argparse.SUPPRESS)  # the process of one case
    asked = parser.parse_args()
    if asked.case:
        print(json.dumps(CASES[asked.case](asked.rounds)))
        return
    if not asked.render:
        measure([name for name in CASES if name.startswith(tuple(asked.only))], asked.rounds, asked.record)
    if asked.record == RECORD:
        render(json.loads(RECORD.read_text(encoding="utf-8")))


def measure(names: list[str], rounds: int, path: Path) -> None:
    """Play cases, each in its own process, and put them into the record."""
    record = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"cases": {}}
    machine = f"{platform.machine()}, {os.cpu_count()} cores"
    record |= {"machine": machine, "torch": torch.__version__, "fedu2": fedu2.__version__}
    for name in names:
        command = [sys.executable, "-m", "benchmarks.load", "--case", name, "--rounds", str(rounds)]
        done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
        found = record["cases"][name] = json.loads(done.stdout.splitlines()[-1])
        print(f"{name}: {found['round_cpu']:.3g} s a round, at most {found['peak_mb']:.0f} MB", flush=True)
        write_atomically(path, json.dumps(record, indent=1) + "\n")


def render(record: Mapping[str, Any]) -> None:
    """The tables of the page, from the record alone."""
    page = PAGE.read_text(encoding="utf-8")
    before, _, rest = page.partition(MARKERS[0])
    after = rest.partition(MARKERS[1])[2]
    write_atomically(PAGE, before + MARKERS[0] + "\n" + tables(record["cases"]) + "\n" + MARKERS[1] + after)


def tables(cases: Mapping[str, Any]) -> str:
    """Sizes with their growth, and the long run in three parts."""
    lines = ["| case | processor seconds a round | times | peak memory, MB | more | checkpoints, MB |", "| --- |" * 1]
    lines[1] = "| --- " * 6 + "|"
    pairs = [(f"clients {method} {few}", f"clients {method} {many}") for method, (few, many) in CLIENTS.items()]
    for small, large in [*pairs, ("images 100000", "images 200000")]:
        if small in cases and large in cases:
            a, b = cases[small], cases[large]
            lines.append(_line(small, a, "", ""))
            more = f"+{b['peak_mb'] - a['peak_mb']:.0f}"
            lines.append(_line(large, b, f"{b['round_cpu'] / a['round_cpu']:.2f}", more))
    long = cases.get("rounds")
    return "\n".join(lines) + "\n" + (_long(long) if long else "")


def _line(name: str, found: Mapping[str, Any], times: str, more: str) -> str:
    figures = f"{found['round_cpu']:.1f} | {times} | {found['peak_mb']:.0f} | {more} | {found['checkpoints_mb']:.1f}"
    return f"| {name} | {figures} |"


def _long(found: Mapping[str, Any]) -> str:
    """Of a long run: what a round takes, memory and handles at its beginning, in its middle and at its end."""
    blocks = found["blocks"]  # the first is of the untrained model
    lines = ["", "| rounds | processor ms a round | memory, MB | open files |", "| --- | --- | --- | --- |"]
    for before, after in itertools.pairwise(blocks):
        if (after["round"] // BLOCK) % 4 == 0 or before["round"] == 0:
            spent = 1000 * (after["cpu"] - before["cpu"]) / (after["round"] - before["round"])
            told = f"{spent:.1f} | {after['resident_mb']:.0f} | {after['handles']:.0f}"
            lines.append(f"| {before['round']:.0f} to {after['round']:.0f} | {told} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
