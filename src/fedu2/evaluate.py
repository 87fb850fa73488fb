"""From a run to what its encoder is worth: `evaluate`, written beside the run as evaluation.json."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from fedu2 import parsing
from fedu2.data import load_dataset
from fedu2.engine import choose, choose_device
from fedu2.errors import UsageError
from fedu2.evaluation.judge import Candidate, Score, judge, protocols
from fedu2.evaluation.options import Protocols
from fedu2.files import write_atomically
from fedu2.methods import build
from fedu2.run import Run, environment

__all__ = ["evaluate", "kept", "parse_protocols"]

FILE = "evaluation.json"
ALL = ("knn", "linear", "finetune", "supervised")


def parse_protocols(assignments: Sequence[str]) -> Protocols:
    """The settings of the protocols from `key=value`, such as linear.epochs=100."""
    try:
        return Protocols.model_validate(parsing.tree(Protocols, {}, assignments))
    except ValidationError as error:
        raise UsageError(parsing.explain(Protocols, error)) from None


def evaluate(
    run: Run,
    names: Sequence[str] = ALL,
    options: Protocols | None = None,
    *,
    seeds: int = 3,
    untrained: bool = False,
    best: bool = False,
    data: str | Path | None = None,
    device: str = "auto",
) -> dict[str, Score]:
    """Judge the global encoder of the run's last checkpoint, of its best round, or as it was before training.

    data: a folder with one sub-folder a class, in place of the run's own images.  The scores are also kept in the run's
    evaluation.json, those of other encoders, images and settings beside them.
    """
    for name in names:
        protocols[name]  # an unknown one explains itself before anything is computed
    if untrained and best:
        raise UsageError("an encoder is untrained or that of the best round, not both")
    options, place = options or Protocols(), choose_device(device)
    experiment = run.experiment

    def fresh() -> Any:
        return build(experiment).learner().encoder.to(place)

    encoder = fresh() if untrained else run.encoder(place, best=best)
    if data is None:
        dataset = load_dataset(experiment.dataset, experiment.data)
    else:
        folder = experiment.data.model_copy(update={"root": str(data), "layout": "images"})
        dataset = load_dataset("folder", folder)
    dataset = dataset.to(place)
    engine = choose(experiment.with_(device=device, precision="auto"), place)
    candidate = Candidate(encoder, fresh, dataset.train, dataset.test, engine)
    entry = {
        "encoder": "untrained" if untrained else "best" if best else "last",
        "round": 0 if untrained else run.best_round if best else run.rounds_played,
        "data": str(data) if data else experiment.dataset,
        "seeds": seeds,
        "options": options.model_dump(mode="json"),
        "environment": environment(engine),
    }
    scores: dict[str, Score] = {}
    for name in names:  # each is kept as soon as it is there
        began = time.perf_counter()
        found = judge(candidate, [name], options, range(seeds))
        taken = {"seconds": (time.perf_counter() - began) / len(found)}
        _keep(run.path / FILE, [{**entry, "protocol": key, **_figures(found[key]), **taken} for key in found])
        scores |= found
    return scores


def kept(run: Run) -> list[dict[str, Any]]:
    """What was measured of the run so far, one entry a protocol."""
    path = run.path / FILE
    return list(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else []


def _figures(score: Score) -> dict[str, Any]:
    return {"mean": score.mean, "deviation": score.deviation, "values": list(score.values)}


def _keep(path: Path, entries: list[dict[str, Any]]) -> None:
    """Add to what was measured before; the same measurement made anew takes the place of the old one."""

    def key(entry: Mapping[str, Any]) -> str:
        return json.dumps([entry[name] for name in ("protocol", "encoder", "round", "data", "seeds", "options")])

    before = kept(Run(path.parent))
    anew = {key(entry) for entry in entries}
    others = [entry for entry in before if key(entry) not in anew]
    write_atomically(path, json.dumps([*others, *entries], indent=1) + "\n")
