"""A run as figures see it: with a name and a look of its own among those that it is shown with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from fedu2.data import Dataset, load_dataset
from fedu2.errors import FedU2Error, UsageError
from fedu2.methods import title_of
from fedu2.report.content import distinct_names
from fedu2.report.snapshot import Snapshot, snapshot
from fedu2.report.style import RUNS
from fedu2.resuming import FREE_KEYS
from fedu2.run import Run

__all__ = ["Subject", "as_subjects", "images_of", "labels_of", "pictured", "series"]

MARKERS = "osD^vPX"  # seven, and six colours: 42 runs that differ
MOST_KEYS = 2  # in a name
LONGEST = 36  # letters


@dataclass(frozen=True, eq=False)
class Subject:
    """One of the runs in a figure."""

    run: Run
    label: str
    colour: str
    marker: str
    device: str = "auto"

    @cached_property
    def snapshot(self) -> Snapshot | FedU2Error:
        """The run's representations, or why there are none; asked for once, for it may take a while."""
        try:
            return snapshot(self.run, self.device)
        except FedU2Error as error:
            return error

    @cached_property
    def dataset(self) -> Dataset | None:
        """The images and labels that the run was trained on, where they are still there."""
        try:
            return load_dataset(self.run.experiment.dataset, self.run.experiment.data)
        except FedU2Error:
            return None

    @property
    def refusal(self) -> FedU2Error | None:
        """Why the run's representations cannot be drawn, if somebody asked."""
        asked = self.__dict__.get("snapshot")
        return asked if isinstance(asked, FedU2Error) else None


def as_subjects(runs: Sequence[Run], device: str = "auto", labels: Sequence[str] | None = None) -> list[Subject]:
    """Runs with the labels, colours and markers that they have in every figure."""
    looks = [(RUNS[i % len(RUNS)], MARKERS[i % len(MARKERS)]) for i in range(len(runs))]
    named = zip(runs, labels or labels_of(runs), looks, strict=True)
    return [Subject(run, _printable(label), *look, device) for run, label, look in named]


def _printable(label: str) -> str:
    """Short enough for a legend, and without what Matplotlib would take for a formula."""
    half = (LONGEST - 1) // 2
    short = label if len(label) <= LONGEST else f"{label[:half]}…{label[-half:]}"
    return short.replace("$", r"\$")


def labels_of(runs: Sequence[Run]) -> list[str]:
    """A name for each run that sets it apart: FedU²-BYOL, then the keys that differ, then the directory."""
    titles = [title_of(run.experiment) for run in runs]
    labels = list(titles)
    for title in {title for title in titles if titles.count(title) > 1}:
        alike = [i for i, other in enumerate(titles) if other == title]
        settings = [runs[i].experiment.flat() for i in alike]
        differing = [
            key
            for key in settings[0]
            if not key.startswith(FREE_KEYS) and any(other[key] != settings[0][key] for other in settings)
        ]
        for i, mine in zip(alike, settings, strict=True):
            labels[i] = ", ".join([title, *(f"{key}={mine[key]}" for key in differing[:MOST_KEYS])])
    names = distinct_names([run.path.resolve() for run in runs])
    return [
        label if labels.count(label) == 1 else f"{label} ({name})" for label, name in zip(labels, names, strict=True)
    ]


def pictured(subjects: Sequence[Subject]) -> list[tuple[Subject, Snapshot]]:
    """Those whose representations can be had; an error where that is none of them."""
    found = [(subject, subject.snapshot) for subject in subjects]
    whole = [(subject, taken) for subject, taken in found if isinstance(taken, Snapshot)]
    if not whole:
        raise next((taken for _, taken in found if isinstance(taken, FedU2Error)), UsageError("there are no runs"))
    return whole


def images_of(shown: Sequence[tuple[Subject, Snapshot]]) -> str:
    """Which images these are."""
    kinds = {taken.tested for _, taken in shown}
    return "test images" if kinds == {True} else "training images" if kinds == {False} else "test or training images"


def series(run: Run, name: str) -> tuple[list[int], list[float]]:
    """Rounds and values of a number in metrics.jsonl."""
    found: list[tuple[int, Any]] = [(record["round"], record.get(name)) for record in run.history]
    numbers = [(round_, float(value)) for round_, value in found if isinstance(value, int | float)]
    return [round_ for round_, _ in numbers], [value for _, value in numbers]
