"""How unified clients are: in the directions that they move in, and in what their models make of the same images."""

from __future__ import annotations

import math
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fedu2.errors import FedU2Error
from fedu2.evaluation.similarity import cka_matrix
from fedu2.report.drawing import Drawing
from fedu2.report.figures.base import figures
from fedu2.report.figures.rounds import by_round, run_handles
from fedu2.report.snapshot import Snapshot
from fedu2.report.style import WIDTH, heat_map, legend, new_figure, titled
from fedu2.report.subject import Subject, pictured, series

__all__ = ["agreement"]

SIDE = WIDTH / 2  # of a matrix with its labels
COSINE = "The nearer the cosine is to 1, the more clients move together."
CKA = (
    "CKA compares what the global model (g) and clients' models, after a round of local training, make of the same"
    " images: 1 is alike but for rotation and scale, a dark row is a model that went its own way."
)


@figures.register("agreement")
def agreement(subjects: Sequence[Subject]) -> Drawing | None:
    """Mean cosine of updates by round, a line a run; linear CKA of global and local models, a matrix a run."""
    moving = [subject for subject in subjects if series(subject.run, "agreement")[0]]
    try:
        shown = pictured(subjects)
    except FedU2Error:
        if not moving:
            raise
        shown = []  # the line needs no models
    matrices = [cka_matrix([taken.features, *taken.local]).numpy() for _, taken in shown]
    lowest = math.floor(10 * min((float(matrix.min()) for matrix in matrices), default=0.0)) / 10
    limits = (min(lowest, 0.9), 1.0)
    figure, line, panels = _layout(len(shown), bool(moving))
    if line is not None:
        by_round(line, moving, "agreement")
        line.set_title("mean cosine between clients' updates")
        legend(figure, run_handles(moving))
    for axes, (subject, taken), matrix in zip(panels, shown, matrices, strict=True):
        cell = (SIDE - 0.9) / len(matrix)
        image = heat_map(axes, matrix, limits=limits, cell=(cell, cell))
        _name_models(axes, taken)
        titled(axes, "linear CKA" if len(shown) == 1 else f"linear CKA: {subject.label}", SIDE - 0.6)
    if panels:
        shrink = 0.8 / (-(-len(panels) // 2))  # as high as a matrix, however many there are
        scale = figure.colorbar(image, ax=panels, pad=0.02, aspect=18, shrink=shrink, anchor=(0.0, 0.9))
        scale.outline.set_visible(False)
    sentences = [COSINE] * bool(moving) + [CKA] * bool(panels)
    return Drawing("agreement", "Agreement between clients", " ".join(sentences), figure)


def _layout(matrices: int, with_line: bool) -> tuple[Figure, Axes | None, list[Axes]]:
    """Panels for the line and the matrices: side by side for one run, else the line above rows of two matrices."""
    if matrices == 1 and with_line:
        figure = new_figure(SIDE - 0.3)
        line, panel = figure.subplots(1, 2)
        return figure, line, [panel]
    rows = -(-matrices // 2)
    heights = [*([2.0] if with_line else []), *[SIDE - 0.2] * rows]
    figure = new_figure(sum(heights))
    cells = figure.add_gridspec(len(heights), 2, height_ratios=heights)
    line = figure.add_subplot(cells[0, :]) if with_line else None
    return figure, line, [figure.add_subplot(cells[with_line + i // 2, i % 2]) for i in range(matrices)]


def _name_models(axes: Axes, taken: Snapshot) -> None:
    names = ["g", *map(str, taken.clients)]
    axes.set_xticks(range(len(names)), names)
    axes.set_yticks(range(len(names)), names)
    axes.set_aspect("equal")
    axes.set_xlabel("client (g: global)")
