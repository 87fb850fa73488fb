"""Figures over rounds, from metrics.jsonl: a panel a quantity, a line a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from fedu2.report.drawing import Drawing
from fedu2.report.figures.base import figures
from fedu2.report.style import faint, grid, integers, legend
from fedu2.report.subject import Subject, series

__all__ = ["by_round", "run_handles"]

CURVES = {
    "loss": "loss",
    "align": "alignment loss $\\ell_a$",
    "fur.loss": "uniformity loss $\\ell_u$ (FUR)",
    "knn": "kNN accuracy (%)",
    "effective_rank": "effective rank, encoder",
    "projector_rank": "effective rank, projector",
}


@figures.register("curves")
def curves(subjects: Sequence[Subject]) -> Drawing | None:
    """Loss terms, kNN accuracy and effective ranks by round."""
    found = {name: title for name, title in CURVES.items() if _holders(subjects, name)}
    if not found:
        return None
    caption = (
        "Loss terms are means over the round's clients; accuracy and rank are the global model's on test images, round"
        " 0 is the untrained encoder. A loss that falls while the rank falls with it is a sign of collapse."
    )
    return Drawing("curves", "Training curves", caption, _panels(subjects, found))


@figures.register("fur")
def fur(subjects: Sequence[Subject]) -> Drawing | None:
    """The mass that FUR moves, and how far from optimal its transport plan is."""
    holders = _holders(subjects, "fur.mass")
    if not holders:
        return None
    figure = _panels(holders, {"fur.mass": "matched share of the mass", "fur.gap": "relative gap of the solver"})
    gaps = [value for subject in holders for value in series(subject.run, "fur.gap")[1] if value > 0]
    if gaps and max(gaps) < 1e-5:
        figure.axes[-1].yaxis.set_major_formatter("{x:.3g}")
    if gaps and max(gaps) > 10 * min(gaps):
        figure.axes[-1].set_yscale("log")
    caption = (
        "The share of mass that unbalanced transport moves from representations to random points on the sphere: at 0"
        " the regulariser is inert. The relative gap bounds how far the transport plan is from the optimum."
    )
    return Drawing("fur", "FUR: matched mass and gap", caption, figure)


def by_round(axes: Axes, subjects: Sequence[Subject], name: str) -> None:
    """A line a run."""
    for subject in subjects:
        rounds, values = series(subject.run, name)
        # A value that stands alone between rounds without one is still seen by its marker.
        every = max(1, len(rounds) // 12)
        axes.plot(rounds, values, color=subject.colour, marker=subject.marker, markevery=every)
    faint(axes)
    integers(axes)


def run_handles(subjects: Sequence[Subject]) -> list[Line2D]:
    """What a legend shows of runs."""
    return [Line2D([], [], color=s.colour, marker=s.marker, label=s.label) for s in subjects]


def _holders(subjects: Sequence[Subject], name: str) -> list[Subject]:
    return [subject for subject in subjects if series(subject.run, name)[0]]


def _panels(subjects: Sequence[Subject], titles: Mapping[str, str]) -> Figure:
    figure, panels = grid(len(titles), height=1.75)
    for axes, (name, title) in zip(panels, titles.items(), strict=True):
        by_round(axes, _holders(subjects, name), name)
        axes.set_title(title)
        axes.yaxis.set_major_locator(MaxNLocator(nbins=5, steps=[1, 2, 2.5, 5, 10]))
        axes.ticklabel_format(axis="y", style="plain", useOffset=False)
    legend(figure, run_handles(subjects))
    return figure
