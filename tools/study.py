"""Train variants of one experiment one after another, and write what came of them as one record:

    python tools/study.py STUDY.yaml RUNS OUT.json [--commit HASH] [KEY=VALUE ...]

STUDY.yaml has `common`, the settings of all variants, `variants`, name → settings of its own, and `protocols`, by which
each is judged in the end. A study chooses settings, so it needs validation images: on test images it does not run.
KEY=VALUE is for what changes no result, such as data.root=PATH. What was begun under RUNS goes on; OUT is written anew
after every variant.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

import fedu2
from fedu2.errors import UsageError
from fedu2.evaluate import evaluate, kept
from fedu2.files import write_atomically
from fedu2.paper.records import FREE, commit
from fedu2.run import Run


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
    """Variant after variant; those that are finished and judged are only written down."""
    plan = yaml.safe_load(study.read_text(encoding="utf-8"))
    experiments = variants(plan, settings)
    records: list[dict[str, Any]] = []
    for name, experiment in experiments.items():
        run = Run(runs / name)
        begun = (run.path / "config.yaml").exists()
        if not (begun and run.finished):
            print(f"== {name}", flush=True)
            run = fedu2.train(experiment, run.path, resume=begun)
        if missing := set(plan["protocols"]) - {entry["protocol"].partition(" ")[0] for entry in kept(run)}:
            evaluate(run, sorted(missing), seeds=1, device=experiment.device)
        records.append(record(name, run, source))
        print(name, {key: round(value, 2) for key, value in records[-1]["scores"].items()}, flush=True)
        write_atomically(out, json.dumps(records, separators=(",", ":")) + "\n")


def variants(plan: Mapping[str, Any], settings: Sequence[str]) -> dict[str, fedu2.Experiment]:
    """By name, all of them checked before the first is trained."""
    for setting in settings:
        if not setting.startswith(FREE) or setting.startswith("seed"):
            raise UsageError(f"{setting} would change the result: it belongs into the study")
    found = {
        name: fedu2.Experiment.parse({**plan["common"], **own}, settings) for name, own in plan["variants"].items()
    }
    for name, experiment in found.items():
        if not experiment.data.validation:
            raise UsageError(f"{name} would be chosen by test images: set data.validation")
    return found


def record(name: str, run: Run, source: str) -> dict[str, Any]:
    """A run with its scores; of its rounds only what is a number."""
    return {
        "name": name,
        "commit": source,
        "environment": run.summary["environment"],
        "config": {key: value for key, value in run.experiment.flat().items() if key != "data.root"},
        "scores": {entry["protocol"]: entry["mean"] for entry in kept(run)},
        "history": [
            {key: value for key, value in round_.items() if isinstance(value, int | float)} for round_ in run.history
        ],
    }


if __name__ == "__main__":
    main()
