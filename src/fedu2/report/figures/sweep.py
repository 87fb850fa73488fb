"""A result against a setting, such as accuracy against λ_U, E or K (the paper's figures 4 and 5)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from fedu2.report.style import RUNS, faint, new_figure, styled
from fedu2.report.subject import MARKERS

__all__ = ["Point", "sweep"]


@dataclass(frozen=True)
class Point:
    """A measured result: its setting, and mean and deviation over seeds."""

    x: float
    mean: float
    deviation: float = 0.0
    seeds: int = 1


def sweep(
    points: Mapping[str, Sequence[Point]], xlabel: str, ylabel: str = "accuracy (%)", height: float = 2.8
) -> Figure:
    """A line for each name, with the deviation where there are several seeds.

    Settings stand at equal distances, as they were chosen: so 0 has a place beside 0.01 … 0.5. Where a point is
    missing, the line is interrupted.
    """
    settings = sorted({point.x for line in points.values() for point in line})
    if not settings:
        raise ValueError("there are no points to draw")
    with styled():
        figure = new_figure(height)
        axes = figure.subplots()
        places = np.arange(len(settings))
        handles = []
        for number, (name, line) in enumerate(points.items()):
            found = {point.x: point for point in line}
            means = [found[x].mean if x in found else np.nan for x in settings]
            errors = [found[x].deviation if x in found and found[x].seeds > 1 else np.nan for x in settings]
            look: dict[str, Any] = {"color": RUNS[number % len(RUNS)], "marker": MARKERS[number % len(MARKERS)]}
            shift = 0.04 * (number - (len(points) - 1) / 2)  # error bars beside each other
            axes.errorbar(places + shift, means, yerr=errors, capsize=3, elinewidth=1, **look)
            (handle,) = axes.plot([], [], label=f"{name} ({_seeds(line)})", **look)
            handles.append(handle)
        axes.set_xticks(places, [f"{x:g}" for x in settings])
        axes.set_xlim(-0.4, len(settings) - 0.6)
        axes.set(xlabel=xlabel, ylabel=ylabel)
        faint(axes)
        figure.legend(handles=handles, loc="outside upper left", ncols=3)
    return figure


def _seeds(line: Sequence[Point]) -> str:
    """Over how many seeds the points of a line are means."""
    counts = sorted({point.seeds for point in line})
    if not counts:
        return "none yet"
    span = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    return f"{span} seed{'s' if counts[-1] > 1 else ''}"
