"""From a run to what its encoder is worth: `evaluate`, written beside the run as evaluation.json."""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from torch import nn

from fedu2 import parsing
from fedu2.data import Dataset, load_dataset
from fedu2.engine import choose, choose_device
from fedu2.errors import DataError, UsageError
from fedu2.evaluation.finetune import tell_of_few_labels
from fedu2.evaluation.judge import Candidate, Score, judge, protocols
from fedu2.evaluation.options import Protocols
from fedu2.files import digest_of, lock_file, read_json, user_path, write_atomically
from fedu2.methods import build
from fedu2.options import DataOptions
from fedu2.run import Run, environment
from fedu2.rundir import RunDirectory

__all__ = ["Verdict", "assess", "evaluate", "kept", "parse_protocols"]

FILE = "evaluation.json"
KEY = {"protocol", "encoder", "round", "data", "seeds", "options"}  # by which measurements are told apart
ALL = ("knn", "linear", "finetune", "supervised")


def parse_protocols(assignments: Sequence[str]) -> Protocols:
    """The settings of the protocols from `key=value`, such as linear.epochs=100."""
    try:
        return Protocols.model_validate(parsing.tree(Protocols, {}, assignments))
    except ValidationError as error:
        raise UsageError(parsing.explain(Protocols, error)) from None


@dataclass(frozen=True)
class Verdict:
    """What an encoder was worth, of which round, and on how many images of which data."""

    scores: dict[str, Score]
    encoder: str  # last, best or untrained
    round: int
    data: str
    trained_on: int  # labelled images that classifiers could learn from
    tested_on: int


def evaluate(
    run: Run, names: Sequence[str] = ALL, options: Protocols | None = None, **choices: Any
) -> dict[str, Score]:
    """The scores of `assess`, by protocol; it takes the same choices."""
    return assess(run, names, options, **choices).scores


def assess(
    run: Run,
    names: Sequence[str] = ALL,
    options: Protocols | None = None,
    *,
    seeds: int = 3,
    untrained: bool = False,
    best: bool = False,
    data: str | Path | None = None,
    holdout: float | None = None,
    device: str = "auto",
    skip: Collection[str] = (),
    enough: Callable[[], bool] = lambda: False,
) -> Verdict:
    """Judge the global encoder of the run's last checkpoint, of its best round, or as it was before training.

    data: a folder with one sub-folder a class, in place of the run's own images; `holdout` of each class (by default as
    in the run, or a tenth) are the test images.  The scores are also kept in the run's evaluation.json, those of other
    encoders, images and settings beside them.

    skip: scores that are not wanted, such as "finetune 1 %".  enough: asked after every score; true ends it early.
    """
    for name in names:
        protocols[name]  # an unknown one explains itself before anything is computed
    if untrained and best:
        raise UsageError("an encoder is untrained or that of the best round, not both")
    kept(run)  # damaged ones complain now, not when a score is lost for it
    if not os.access(run.path, os.W_OK):
        raise UsageError(f"cannot write to {run.path}, where scores are kept")
    options, place = options or Protocols(), choose_device(device)
    experiment = run.experiment

    def fresh(seed: int) -> nn.Module:
        return build(experiment.with_(seed=seed)).learner().encoder.to(place)

    encoder, round_ = (fresh(experiment.seed), 0) if untrained else _trained(run, place, best)
    dataset = _images(run, data, holdout)
    if {"finetune", "supervised"} & set(names) and dataset.train.labels is not None:
        tell_of_few_labels(dataset.train.labels, options.finetune.fractions)
    dataset = dataset.to(place)
    engine = choose(experiment.with_(device=device, precision="auto"), place)
    candidate = Candidate(encoder, fresh, dataset.train, dataset.test, engine)
    kind = "untrained" if untrained else "best" if best else "last"
    entry = {
        "encoder": kind,
        "round": round_,
        "data": str(user_path(data).resolve()) if data is not None else experiment.dataset,
        "seeds": seeds,
        "options": options.model_dump(mode="json"),
        "environment": environment(engine),
    }
    scores: dict[str, Score] = {}
    for name, part in _parts(names, options, skip):  # each score is kept as soon as it is there
        if scores and enough():
            break
        began = time.perf_counter()
        found = judge(candidate, [name], part, range(seeds))
        taken = {"seconds": (time.perf_counter() - began) / len(found)}
        _keep(run, [{**entry, "protocol": key, **_figures(found[key]), **taken} for key in found])
        scores |= found
    where = str(data) if data is not None else experiment.dataset
    return Verdict(scores, kind, round_, where, len(dataset.train), len(dataset.test))


def _parts(names: Sequence[str], options: Protocols, skip: Collection[str]) -> Iterator[tuple[str, Protocols]]:
    """Protocols one score at a time: those with few labels have one for every share."""
    for name in names:
        if name not in ("finetune", "supervised"):
            if name not in skip:
                yield name, options
            continue
        for fraction in options.finetune.fractions:
            if f"{name} {100 * fraction:g} %" not in skip:
                single = options.finetune.model_copy(update={"fractions": (fraction,)})
                yield name, options.model_copy(update={"finetune": single})


def _trained(run: Run, place: torch.device, best: bool) -> tuple[nn.Module, int]:
    learner, round_ = run.model(place, best=best)
    return learner.encoder, round_


def _images(run: Run, data: str | Path | None, holdout: float | None) -> Dataset:
    """The run's own images, if they are still the same, or those of a folder."""
    experiment = run.experiment
    if data is None:
        dataset = load_dataset(experiment.dataset, experiment.data)
        RunDirectory(run.path).check_images(experiment, dataset.digest())
        return dataset
    share = holdout or experiment.data.holdout or DataOptions().holdout
    folder = experiment.data.model_copy(update={"root": str(data), "layout": "images", "holdout": share})
    return load_dataset("folder", folder)


def kept(run: Run) -> list[dict[str, Any]]:
    """What was measured of the run so far, one entry a protocol."""
    path = run.path / FILE
    try:
        entries = read_json(path) if path.exists() else []
        whole = isinstance(entries, list) and all(entry.keys() >= KEY for entry in entries)
    except (OSError, ValueError, AttributeError):
        whole = False
    if not whole:
        raise DataError(f"{path} is damaged: move it away, and measure anew")
    return list(entries)


def _figures(score: Score) -> dict[str, Any]:
    return {"mean": score.mean, "deviation": score.deviation, "values": list(score.values)}


def _keep(run: Run, entries: list[dict[str, Any]]) -> None:
    """Add to what was measured before; the same measurement made anew takes the place of the old one."""

    def key(entry: Mapping[str, Any]) -> str:
        return json.dumps([entry[name] for name in sorted(KEY)])

    anew = {key(entry) for entry in entries}
    with lock_file(run.path / ".evaluation.lock") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another evaluation may be about to add its own
        for draft in run.path.glob(f".{FILE}.*"):
            draft.unlink()  # a crash left it half-written
        others = [entry for entry in kept(run) if key(entry) not in anew]
        sealed = [{**entry, "digest": digest_of(entry)} for entry in entries]
        write_atomically(run.path / FILE, json.dumps([*others, *sealed], indent=1) + "\n")
