"""How fast is a federation on this GPU? `make bench-gpu`; one table is its last output.

    python -m benchmarks.gpu [--out results/bench] [--commit HASH] [--plain 20] [--quick]

Steps by objective with and without FUR, what each fast path brings, rounds of the paper's size at K = 10 and K = 100,
aggregation, kNN, memory; and beside them, in the same run, the plain loop of `benchmarks.plain_loop`. Images are noise,
as speed does not depend on them; client sizes are those of a Dirichlet(0.1) partition of ten balanced classes.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from dataclasses import asdict
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch
from benchmarks import plain_loop
from benchmarks.ceilings import copy_ceiling, matmul_ceiling

from fedu2.aggregators import Updates
from fedu2.aggregators.eua import eua
from fedu2.data import Dataset, ImageSet, make_partition
from fedu2.doctor import version_of
from fedu2.engine import LANES, usable_cores
from fedu2.evaluation import knn_accuracy
from fedu2.evaluation.monitor import evaluate, extract
from fedu2.experiment import Experiment
from fedu2.federation.callbacks import Callback
from fedu2.federation.local import LocalBackend
from fedu2.federation.rounds import initial_state, play_round
from fedu2.methods import ServerState, Task, build, resolve
from fedu2.models.flat import FlatModel
from fedu2.options import EUAOptions

FORWARD_GFLOP = 2 * 0.557  # ResNet-18, one 32-pixel image
PASSES = {"simclr": 3, "simsiam": 3, "byol": 4}  # forward passes' worth of work, a view: 1 + 2 backward (+ 1 target)
VARIANTS: dict[str, dict[str, Any]] = {
    "no graph": {"engine.graph": False},
    "PyTorch's own kernels": {"engine.fused": False, "engine.compile": False},
    "torch.compile": {"engine.fused": False, "engine.compile": True},
    "float32": {"precision": "float32"},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("results/bench"))
    parser.add_argument("--commit", default="")
    parser.add_argument("--plain", type=float, default=20.0, help="seconds for each plain loop")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to see that it runs; works on a CPU, too")
    arguments = parser.parse_args()
    bench = Bench(arguments.quick)
    record = {
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": arguments.commit or _commit(),
        "machine": machine(bench.device),
        "results": bench.run(arguments.plain),
    }
    if not arguments.quick:
        arguments.out.mkdir(parents=True, exist_ok=True)
        name = str(record["machine"]["device"]).lower().replace(" ", "-")
        path = arguments.out / f"{name}-{datetime.now(UTC):%Y%m%d-%H%M%S}.json"
        path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        print(f"\nwritten: {path}")
    print("\n" + table(record["results"]))


class Bench:
    """All measurements on one machine."""

    def __init__(self, quick: bool) -> None:
        self.quick = quick
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.images = 2_000 if quick else 50_000
        self.steps = 2 if quick else 150  # timed at a time
        generator = torch.Generator().manual_seed(0)
        shape = (self.images, 3, 32, 32)
        pixels = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
        labels = torch.arange(self.images) % 10
        self.host_images = pixels
        self.data = Dataset("noise", ImageSet(pixels, labels), ImageSet(pixels[::5], labels[::5])).to(self.device)

    def experiment(self, **keys: Any) -> Experiment:
        small = {"encoder": "tiny", "batch_size": 32} if self.quick else {}
        return resolve(
            Experiment.parse({"dataset": "cifar10", "method": "fedu2", "objective": "byol", **small, **keys})
        )

    def run(self, plain_seconds: float) -> dict[str, Any]:
        results: dict[str, Any] = {}
        for name, measure in {
            "ceilings": self.ceilings,
            "steps": self.all_steps,
            "rounds": self.rounds,
            "aggregation": self.aggregation,
            "knn": self.knn,
            "plain": lambda: self.plain(plain_seconds),
        }.items():
            began = time.perf_counter()
            results[name] = measure()
            print(f"{name}: {time.perf_counter() - began:.0f} s  {json.dumps(results[name])}", flush=True)
        return results

    def ceilings(self) -> dict[str, float]:
        sizes = ({"size": 256}, {"size": 10**6}) if self.quick else ({}, {})
        return {
            "matmul_tflops": matmul_ceiling(self.device, **sizes[0]),
            "copy_tbs": copy_ceiling(self.device, **sizes[1]),
        }

    def all_steps(self) -> list[dict[str, Any]]:
        rows = []
        for objective in ("byol", "simclr", "simsiam"):
            for weight in (0.0, 0.1):
                for lanes in (1, LANES):
                    rows.append(self.step(objective, weight, lanes))
        return rows + [self.step("byol", 0.1, 1, variant) for variant in VARIANTS]

    def step(self, objective: str, weight: float, lanes: int, variant: str = "") -> dict[str, Any]:
        """Milliseconds a step when each lane has one long client: the clock runs over all of them."""
        keys = {"fur.weight": weight, "engine.lanes": lanes, **(VARIANTS[variant] if variant else {})}
        experiment = self.experiment(objective=objective, clients=lanes, **keys)
        shares = list(torch.arange(self.images).chunk(lanes))
        backend = LocalBackend(build(experiment), self.data.train, shares)
        server = initial_state(build(experiment), self.device).server
        self.train(backend, server, lanes, 1)  # captures
        steps = max(1, self.steps // lanes)
        times = [self.train(backend, server, lanes, steps) for _ in range(1 if self.quick else 3)]
        ms = 1e3 * statistics.median(times) / (steps * lanes)
        flop = 2 * experiment.batch_size * PASSES[objective] * FORWARD_GFLOP / 1e3  # TFLOP
        traits = (objective + (" + FUR" if weight else ""), f"{lanes} at once" if lanes > 1 else "", variant)
        label = ", ".join(trait for trait in traits if trait)
        print(f"  {label}: {ms:.3f} ms", flush=True)
        return {
            "label": label,
            "objective": objective,
            "fur": weight > 0,
            "lanes": lanes,
            "ms": ms,
            "samples_per_second": 1e3 * experiment.batch_size / ms,
            "tflops": 1e3 * flop / ms,
        }

    def train(self, backend: LocalBackend, server: ServerState, clients: int, steps: int) -> float:
        tasks = [Task(round=1, client=k, steps=steps, lr=0.032, progress=0.0) for k in range(clients)]
        return self.timed(lambda: list(backend.run(tasks, server, {}, Callback())))

    def rounds(self) -> list[dict[str, Any]]:
        return [self.round(clients) for clients in ((10, 100) if not self.quick else (3,))]

    def round(self, clients: int) -> dict[str, Any]:
        """Rounds of FedU²-BYOL with E = 5, aggregation included; the median of rounds 2 and 3, and the first."""
        experiment = self.experiment(clients=clients, local_epochs=1 if self.quick else 5)
        method, shares = build(experiment), make_partition(self.data, experiment)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        backend = LocalBackend(method, self.data.train, shares)
        state = initial_state(method, self.device)
        seconds = []
        for _ in range(3):
            began = time.perf_counter()
            state, record = play_round(state, method, backend, [len(share) for share in shares], Callback())
            self.wait()
            seconds.append(time.perf_counter() - began)
        model = FlatModel(method.learner(), self.device)
        model.load(state.server.model)
        evaluation = self.timed(lambda: evaluate(model.module, self.data, experiment))
        return {
            "clients": clients,
            "smaller_than_a_batch": sum(len(share) < experiment.batch_size for share in shares),
            "samples": record["samples"],
            "first_seconds": seconds[0],
            "seconds": statistics.median(seconds[1:]),
            "samples_per_second": record["samples"] / statistics.median(seconds[1:]),
            "evaluation_seconds": evaluation,
            "peak_gb": torch.cuda.max_memory_allocated() / 1e9 if self.device.type == "cuda" else None,
            "reserved_gb": torch.cuda.max_memory_reserved() / 1e9 if self.device.type == "cuda" else None,
        }

    def aggregation(self) -> dict[str, float]:
        """Seconds of EUA for K models of 15 M parameters."""
        size = 15_000 if self.quick else 15_000_000
        aggregate = eua(EUAOptions())
        found = {}
        for clients in (10, 100):
            start = torch.randn(size, device=self.device)
            models = torch.stack([start + 0.01 * torch.randn_like(start) for _ in range(clients)])
            updates = Updates(start, models, torch.full((clients,), 1 / clients, dtype=torch.float64))
            aggregate(updates)  # overwrites the models, which makes no difference to the time
            found[str(clients)] = self.timed(partial(aggregate, updates))
            del models, updates
        return found

    def knn(self) -> dict[str, float]:
        """Seconds of kNN for 10,000 queries against 50,000, 512 features; and of the encoder's passes before it."""
        queries, bank = len(self.data.test), len(self.data.train)
        features = torch.randn(queries + bank, 512, device=self.device)
        labels = torch.randint(0, 10, (queries + bank,), device=self.device)

        def classify() -> float:
            return knn_accuracy(features[:queries], labels[:queries], features[queries:], labels[queries:])

        classify()
        model = FlatModel(build(self.experiment()).learner(), self.device).module
        everything = torch.cat([self.data.train.images, self.data.test.images])
        extract(model.encoder, everything[:512])
        return {
            "seconds": self.timed(classify),
            "features_seconds": self.timed(lambda: extract(model.encoder, everything)),
        }

    def plain(self, seconds: float) -> list[dict[str, Any]]:
        rows = []
        small: dict[str, Any] = {"encoder": "tiny", "batch_size": 32, "workers": 0} if self.quick else {}
        for clients in (10, 100) if not self.quick else (3,):
            shares = make_partition(self.data, self.experiment(clients=clients))
            generator = torch.Generator().manual_seed(1)
            shares = [shares[k] for k in torch.randperm(clients, generator=generator).tolist()]
            result = plain_loop.measure(
                self.host_images, shares, "byol", self.device, 1.0 if self.quick else seconds, **small
            )
            rows.append({"clients": clients, **asdict(result)})
        return rows

    def timed(self, work: Callable[[], Any]) -> float:
        self.wait()
        began = time.perf_counter()
        work()
        self.wait()
        return time.perf_counter() - began

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def table(results: dict[str, Any]) -> str:
    """The figures for a reader."""
    ceiling = results["ceilings"]["matmul_tflops"]
    lines = [
        f"ceilings: {ceiling:.0f} TFLOP/s bf16 matrix product, {results['ceilings']['copy_tbs']:.2f} TB/s copy",
        "",
    ]
    lines.append(f"{'step, B = 128':34}{'ms':>8}{'samples/s':>12}{'of ceiling':>12}")
    for row in results["steps"]:
        speed = f"{row['ms']:8.2f}{row['samples_per_second']:12,.0f}{row['tflops'] / ceiling:12.0%}"
        lines.append(f"{row['label']:34}{speed}")
    lines += ["", f"{'round of FedU²-BYOL, E = 5':34}{'s':>8}{'samples/s':>12}{'plain loop':>12}{'ratio':>8}"]
    plain = {row["clients"]: row for row in results["plain"]}
    for row in results["rounds"]:
        beside = plain[row["clients"]]["samples_per_second"]
        lines.append(
            f"{'K = ' + str(row['clients']):34}{row['seconds']:8.2f}{row['samples_per_second']:12,.0f}"
            f"{beside:12,.0f}{row['samples_per_second'] / beside:8.1f}"
        )
    lines.append("")
    for clients, seconds in results["aggregation"].items():
        lines.append(f"{'EUA, 15 M parameters, K = ' + clients:34}{seconds:8.3f} s")
    lines.append(f"{'kNN, 10,000 against 50,000':34}{results['knn']['seconds']:8.3f} s")
    lines.append(f"{'features of 60,000 images':34}{results['knn']['features_seconds']:8.3f} s")
    for row in results["rounds"]:
        if row["peak_gb"] is not None:
            lines.append(f"{'peak memory, K = ' + str(row['clients']):34}{row['peak_gb']:8.2f} GB")
    return "\n".join(lines)


def machine(device: torch.device) -> dict[str, str]:
    """What the figures depend on."""
    cuda = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if cuda else platform.machine(),
        "torch": torch.__version__,
        "cuda": str(torch.version.cuda),
        "cudnn": str(torch.backends.cudnn.version()),
        "triton": version_of("triton") or "–",
        "python": platform.python_version(),
        "cpu_cores": f"{usable_cores():g}",
    }


def _commit() -> str:
    found = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return found.stdout.strip()


if __name__ == "__main__":
    main()
