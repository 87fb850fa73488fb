"""Who holds which images: clients × classes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import SubFigure

from fedu2.files import read_json
from fedu2.report.drawing import Drawing
from fedu2.report.figures.base import figures
from fedu2.report.style import RUNS, WIDTH, faint, heat_map, highest, new_figure, titled, whole_numbers
from fedu2.report.subject import Subject

__all__ = ["partition"]

BARS = 1.55  # inches: the bars, and the labels of a table
NAMED = 20  # classes at most whose names have room


@dataclass(frozen=True, eq=False)
class _Table:
    """Images by client and class, (K, classes), or by client alone, (K, 1); and the runs that share this partition."""

    counts: np.ndarray[Any, Any]
    classes: tuple[str, ...] = ()
    labels: list[str] = field(default_factory=list)

    @property
    def height(self) -> float:
        """Of the map, in inches."""
        return min(0.17 * self.counts.shape[1], 3.4) if self.counts.shape[1] > 1 else 0.0


@figures.register("partition")
def partition(subjects: Sequence[Subject]) -> Drawing | None:
    """Images by client and class; each partition once, however many runs share it."""
    tables: dict[str, _Table] = {}
    for subject in subjects:
        table = _count(subject)
        if table is not None:
            tables.setdefault(str(table.counts.tolist()), table).labels.append(subject.label)
    if not tables:
        return None
    heights = [table.height + BARS for table in tables.values()]
    figure = new_figure(sum(heights))
    parts = figure.subfigures(len(tables), 1, squeeze=False, height_ratios=heights).ravel()
    for part, table in zip(parts, tables.values(), strict=True):
        _draw(part, table, named=len(tables) > 1)
    caption = "Training images of each client"
    if any(table.height for table in tables.values()):
        caption += ", and of which classes they are: the more uneven the columns, the less alike the clients"
    return Drawing("partition", "Who holds which images", f"{caption}.", figure)


def _count(subject: Subject) -> _Table | None:
    """None where the partition cannot be read; without classes where labels are not known."""
    try:
        shares = read_json(subject.run.path / "partition.json")["clients"]
        last = max(max(share) for share in shares)
    except (OSError, ValueError, KeyError, TypeError):
        return None
    dataset = subject.dataset
    labels = None if dataset is None else dataset.train.labels
    if dataset is None or labels is None or last >= len(labels):
        return _Table(np.array([[len(share)] for share in shares]))
    classes = max(int(labels.max()) + 1, len(dataset.classes))
    counts = np.stack([np.bincount(labels.numpy()[share], minlength=classes) for share in shares])
    return _Table(counts, dataset.classes)


def _draw(part: SubFigure, table: _Table, named: bool) -> None:
    """Bars above, the map below."""
    ratios = [1.0, table.height] if table.height else [1.0]
    bars, *below = part.subplots(len(ratios), 1, squeeze=False, sharex=True, height_ratios=ratios).ravel()
    _bars(bars, table.counts.sum(1))
    if named:
        titled(bars, " and ".join(table.labels), WIDTH - 1)
    for axes in below:
        shown = np.where(table.counts > 0, table.counts, np.nan).T  # (classes, clients)
        cell = ((WIDTH - 1.8) / shown.shape[1], table.height / shown.shape[0])
        image = heat_map(axes, shown, limits=(0, highest(shown)), cell=cell, form="{:.0f}")
        part.colorbar(image, ax=axes, pad=0.01, aspect=20, label="images").outline.set_visible(False)
        whole_numbers(axes, shown.shape)
        if 0 < len(table.classes) <= NAMED:
            axes.set_yticks(range(len(table.classes)), table.classes)
        else:
            axes.set_ylabel("class")
    (below or [bars])[-1].set_xlabel("client")


def _bars(axes: Axes, sizes: np.ndarray[Any, Any]) -> None:
    bars = axes.bar(np.arange(len(sizes)), sizes, color=RUNS[0], width=0.8)
    axes.set_ylabel("images")
    axes.set_xlim(-0.5, len(sizes) - 0.5)
    whole_numbers(axes, (5, len(sizes)))
    faint(axes)
    if len(sizes) <= 12:
        axes.bar_label(bars, fmt="{:,.0f}", fontsize=8, padding=1)
        axes.margins(y=0.18)
