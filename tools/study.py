"""Train variants of one experiment one after another, and write what came of them as one record:

    python tools/study.py STUDY.yaml RUNS OUT.json [--commit HASH] [KEY=VALUE ...]

STUDY.yaml has `common`, the settings of all variants, `variants`, name → settings of its own, and `protocols`, by which
each is judged in the end. A study chooses settings, so it needs validation images: on test images it does not run.
KEY=VALUE is for what changes no result, such as data.root=PATH. What was begun under RUNS goes on. OUT is written anew
after every variant, and after every round in which kNN is measured: a run that is cut off is there as far as it went,
without scores.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

import fedu2
from fedu2.engine import choose, choose_device
from fedu2.errors import UsageError
from fedu2.evaluate import assess, kept
from fedu2.evaluation.judge import protocols
from fedu2.federation.callbacks import Callback
from fedu2.files import write_atomically
from fedu2.paper.records import commit, papers_own
from fedu2.resuming import FREE_KEYS, KEPT_KEYS
from fedu2.run import Run, environment


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse, and run what is missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", type=Path)
    parser.add_argument("runs", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--commit", help="of the source; default: asked from git")
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE")
    asked = parser.parse_intermixed_args(arguments)
    run_study(asked.study, asked.runs, asked.out, asked.settings, commit() if asked.commit is None else asked.commit)


def run_study(study: Path, runs: Path, out: Path, settings: Sequence[str], source: str) -> None:
    """Variant after variant; one that is finished and judged is only looked at, and written down."""
    plan = yaml.safe_load(study.read_text(encoding="utf-8"))
    experiments, judges = variants(plan, settings), judges_of(plan)
    records: list[dict[str, Any]] = []
    for name, experiment in experiments.items():
        path = runs / name
        print(f"== {name}", flush=True)

        def keep(name: str = name, path: Path = path) -> None:
            write(out, [*records, record(name, Run(path), source)])

        # Of a finished run this makes sure that it is this experiment.
        run = fedu2.train(experiment, path, resume=(path / "config.yaml").exists(), callbacks=[Keep(keep)])
        assess(run, judges, seeds=1, device=experiment.device, skip=scores(run))
        records.append(record(name, Run(path), source))
        print(name, {score: round(value, 2) for score, value in records[-1]["scores"].items()}, flush=True)
        write(out, records)


class Keep(Callback):
    """Calls `keep` after every judged round."""

    def __init__(self, keep: Callable[[], None]) -> None:
        self.keep = keep

    def on_round(self, record: Mapping[str, Any]) -> None:
        if "knn" in record:
            self.keep()


def write(out: Path, records: Sequence[Mapping[str, Any]]) -> None:
    """One line of JSON."""
    write_atomically(out, json.dumps(records, separators=(",", ":")) + "\n")


def variants(plan: Any, settings: Sequence[str]) -> dict[str, fedu2.Experiment]:
    """By name, all of them checked before the first is trained."""
    for setting in settings:
        key = setting.partition("=")[0]
        if not key.startswith(FREE_KEYS) or key in KEPT_KEYS:
            raise UsageError(f"{setting} may change the result: it belongs in the study")
    parts = [plan.get(part) for part in ("common", "variants")] if isinstance(plan, Mapping) else [None]
    if not all(isinstance(part, Mapping) for part in parts) or not all(
        isinstance(own, Mapping) for own in plan["variants"].values()
    ):
        raise UsageError("a study has common: settings, variants: name: settings, and protocols: a list")
    found = {
        str(name): fedu2.Experiment.parse({**plan["common"], **own}, settings) for name, own in plan["variants"].items()
    }
    for name, experiment in found.items():
        if not experiment.data.validation:
            raise UsageError(f"{name} would be chosen by test images: set data.validation")
    return found


def judges_of(plan: Mapping[str, Any]) -> list[str]:
    """The protocols; an unknown one explains itself before anything is trained."""
    names = plan.get("protocols")
    if not isinstance(names, list) or not names:
        raise UsageError("a study has protocols, a list such as [knn, linear]")
    for name in names:
        protocols[name]
    return names


def scores(run: Run) -> dict[str, float]:
    """Of the encoder after the last round, by the protocols as they are by default."""
    entries, experiment = kept(run), run.experiment
    names = dict.fromkeys(entry["protocol"] for entry in entries)
    found = {name: papers_own(entries, name, experiment.dataset, experiment.rounds) for name in names}
    return {name: fitting[-1]["mean"] for name, fitting in found.items() if fitting}


def record(name: str, run: Run, source: str) -> dict[str, Any]:
    """A run with its scores; of its rounds only what is a number."""
    return {
        "name": name,
        "commit": source,
        "environment": run.summary["environment"] if run.finished else _present(run),
        "config": {key: value for key, value in run.experiment.flat().items() if key != "data.root"},
        "scores": scores(run),
        "history": [
            {key: value for key, value in round_.items() if isinstance(value, int | float)} for round_ in run.history
        ],
    }


def _present(run: Run) -> dict[str, str]:
    """The environment of a run that trains here and now."""
    return environment(choose(run.experiment, choose_device(run.experiment.device)))


if __name__ == "__main__":
    main()
