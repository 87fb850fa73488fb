"""What hostile clients do to an encoder, and what the defences leave of it: python -m benchmarks.robustness

    --device cuda               where to train
    --seeds 0 1                 each cell once for every seed
    --only "sign flip" none     attacks (or `none`, the attack-free run) to play; default: all
    --defences none bounds      columns to play; default: all
    --set rounds=20             other keys of the experiment, for a record of its own: --record FILE
    --jobs 8                    cells played at once, each in a process of its own
    --render                    only write the table of docs/robustness.md anew

Cells that the record holds already are not played again, so an interrupted grid goes on where it was. A record is of
one setting: another one is refused.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import torch
from benchmarks.hostile import ATTACKS, Hostile

import fedu2
from fedu2.engine import choose, choose_device
from fedu2.errors import TrainingError
from fedu2.experiment import Experiment
from fedu2.federation.local import LocalBackend
from fedu2.files import write_atomically
from fedu2.methods import resolve
from fedu2.run import environment

ROOT = Path(__file__).parents[1]
RECORD = ROOT / "results" / "robustness.json"
PAGE = ROOT / "docs" / "robustness.md"
MARKERS = "<!-- table: python -m benchmarks.robustness --render -->\n", "<!-- end of table -->\n"

SETTING: dict[str, Any] = {
    "dataset": "sample", "method": "fedu2", "objective": "byol", "clients": 10, "alpha": 0.5, "rounds": 10,
    "data.image_size": 24, "width": 16, "evaluation.every": 0, "engine.threads": 1, "byol.target": "shared",
}  # fmt: skip
BOUNDS = {"defence.clip": 2.0, "defence.claims": 2.0}
DEFENCES: dict[str, dict[str, Any]] = {
    "none": {},
    "bounds": BOUNDS,
    "bounds, multi-Krum": {**BOUNDS, "defence.rule": "multi_krum"},
    "bounds, trimmed": {**BOUNDS, "defence.rule": "trimmed"},
}
SHARES = (0.1, 0.3)


class Cell(NamedTuple):
    """One run of the grid; without an attack the share is 0."""

    attack: str
    share: float
    defence: str
    seed: int


def grid(seeds: Sequence[int], attacks: Sequence[str], defences: Sequence[str] = tuple(DEFENCES)) -> Iterator[Cell]:
    """Attack-free runs first, then the largest share of attackers."""
    for seed in seeds:
        for attack in attacks:
            for share in (0.0,) if attack == "none" else sorted(SHARES, reverse=True):
                yield from (Cell(attack, share, defence, seed) for defence in defences)


def attackers(cell: Cell, clients: int) -> list[int]:
    """Drawn by the seed, the same for every attack and defence; of fewer, the first of them."""
    order = torch.randperm(clients, generator=torch.Generator().manual_seed(cell.seed)).tolist()
    return sorted(order[: round(cell.share * clients)])


def play(cell: Cell, setting: Mapping[str, Any], device: str) -> dict[str, Any]:
    """One run and its figures; without a defence the server trusts its clients, and EUA's guard is the plain one."""
    experiment = Experiment.parse({**setting, **DEFENCES[cell.defence], "seed": cell.seed, "device": device})
    hostile = attackers(cell, experiment.clients)
    attack = ATTACKS.get(cell.attack)
    with tempfile.TemporaryDirectory() as folder:
        try:
            run = fedu2.train(
                experiment,
                Path(folder) / "run",
                backend=lambda *parts: Hostile(LocalBackend(*parts), hostile, attack, trusted=cell.defence == "none"),
            )
        except TrainingError as error:  # such as a global model that is not finite any more
            return {**cell._asdict(), "attackers": hostile, "knn": None, "failed": str(error).partition(";")[0]}
        summary = run.summary
    told = {key: summary[key] for key in ("knn", "untrained_knn", "left_out", "bounded") if key in summary}
    return {**cell._asdict(), "attackers": hostile, **told}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--only", nargs="+", default=["none", *ATTACKS], choices=["none", *ATTACKS])
    parser.add_argument("--defences", nargs="+", default=list(DEFENCES), choices=list(DEFENCES))
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE")
    parser.add_argument("--record", type=Path, default=RECORD)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--commit", default="", help="of this code, where git cannot tell")
    parser.add_argument("--render", action="store_true")
    arguments = parser.parse_args()
    if not arguments.render:
        _play_missing(arguments)
    if arguments.record == RECORD:
        render()


def _play_missing(arguments: argparse.Namespace) -> None:
    asked = Experiment.parse(SETTING, arguments.set)
    setting = {k: v for k, v in resolve(asked).flat().items() if not k.startswith(("defence.", "seed", "device"))}
    record = _record(arguments.record, setting)
    here = _here(setting, arguments.device, arguments.commit)
    known = {Cell(*(run[name] for name in Cell._fields)) for run in record["runs"]}
    missing = [cell for cell in grid(arguments.seeds, arguments.only, arguments.defences) if cell not in known]
    with ProcessPoolExecutor(arguments.jobs, get_context("spawn")) as pool:
        playing = [pool.submit(play, cell, setting, arguments.device) for cell in missing]
        for played in as_completed(playing):
            record["runs"].append({**played.result(), **here})
            print(json.dumps(record["runs"][-1]), flush=True)
            write_atomically(arguments.record, json.dumps(record, indent=1) + "\n")


def _here(setting: Mapping[str, Any], device: str, commit: str) -> dict[str, str]:
    """Where and by which code a run is played."""
    described = ["git", "describe", "--always", "--dirty"]
    commit = commit or subprocess.run(described, cwd=ROOT, capture_output=True, text=True).stdout.strip()
    found = environment(choose(Experiment.parse(setting), choose_device(device)))
    return {"machine": f"{found['device']}, torch {found['torch']}", "commit": commit}


def _record(path: Path, setting: Mapping[str, Any]) -> dict[str, Any]:
    if not path.exists():
        return {"setting": dict(setting), "defences": {name: dict(keys) for name, keys in DEFENCES.items()}, "runs": []}
    record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    known = resolve(Experiment.parse(record["setting"])).flat()  # keys that came since have their defaults
    if any(known[key] != value for key, value in setting.items()) or record["defences"] != DEFENCES:
        raise SystemExit(f"{path} is of another setting: name another --record")
    return record


def table(record: Mapping[str, Any]) -> str:
    """kNN in %, means over seeds; in parentheses the points to the attack-free run without defences, same seeds."""
    runs = {Cell(*(run[name] for name in Cell._fields)): run for run in record["runs"]}
    seeds = sorted({cell.seed for cell in runs})
    lines = ["| attack | hostile | " + " | ".join(DEFENCES) + " |", "| --- | --- |" + " --- |" * len(DEFENCES)]
    for attack, share in [("none", 0.0), *((name, share) for name in ATTACKS for share in SHARES)]:
        figures = [_figure(runs, attack, share, defence, seeds) for defence in DEFENCES]
        lines.append(f"| {attack} | {share:.0%} | " + " | ".join(figures) + " |")
    return "\n".join(lines) + "\n\n" + _described(record, runs, seeds)


def _described(record: Mapping[str, Any], runs: Mapping[Cell, Mapping[str, Any]], seeds: list[int]) -> str:
    """In words: the setting, the untrained encoder, seeds, machine and commit."""
    told, keys = record["setting"], ("method", "objective", "encoder", "width", "clients", "alpha", "rounds")
    setting = ", ".join(f"{key} {told[key]}" for key in (*keys, "local_epochs", "data.image_size"))
    untrained = [run["untrained_knn"] for run in runs.values() if "untrained_knn" in run]
    counts = {seed: sum(cell.seed == seed for cell in runs) for seed in seeds}
    played = ", ".join(f"seed {seed}: {count} of {len(list(grid([seed], ['none', *ATTACKS])))}" for seed, count in
                       counts.items())  # fmt: skip
    origins = "; ".join(sorted({f"{run['machine']}, commit {run['commit']}" for run in runs.values()}))
    return (
        f"The sample; {setting}. The untrained encoder has {statistics.mean(untrained):.1f}. Cells played: {played}.\n"
        f"{origins}.\n"
    )


def _figure(runs: Mapping[Cell, Mapping[str, Any]], attack: str, share: float, defence: str, seeds: list[int]) -> str:
    played = [seed for seed in seeds if Cell(attack, share, defence, seed) in runs]
    if not played:
        return "–"
    found = [runs[Cell(attack, share, defence, seed)]["knn"] for seed in played]
    if None in found:
        return "not finite"
    shown = f"{statistics.mean(found):.1f}"
    free = [runs.get(Cell("none", 0.0, "none", seed)) for seed in played]
    if (attack, defence) != ("none", "none") and all(free):
        shown += f" ({statistics.mean(found) - statistics.mean(run['knn'] for run in free if run):+.1f})"
    return shown


def render() -> None:
    """The table in the document, from the record."""
    text = PAGE.read_text(encoding="utf-8")
    before, _, rest = text.partition(MARKERS[0])
    after = rest.partition(MARKERS[1])[2]
    record = json.loads(RECORD.read_text(encoding="utf-8"))
    write_atomically(PAGE, before + MARKERS[0] + "\n" + table(record) + "\n" + MARKERS[1] + after)


if __name__ == "__main__":
    main()
