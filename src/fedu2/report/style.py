"""How figures look: one width, readable type, colours that colour-blind readers can tell apart, room for the data.

Matplotlib's global state is left alone: figures are `Figure` objects, and settings hold within `styled()` only.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from textwrap import wrap
from typing import Any

import numpy as np
from matplotlib import style
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

__all__ = [
    "CLASSES",
    "INK",
    "RUNS",
    "WIDTH",
    "faint",
    "grid",
    "heat_map",
    "highest",
    "integers",
    "legend",
    "new_figure",
    "styled",
    "titled",
    "whole_numbers",
]

WIDTH = 6.7  # inches: a page's 17 cm
LETTER = 4.6  # points: the mean width of a letter
INK = "#1b2026"  # of text, axes and outlines, and of nothing else: pages put their own ink in its place

# Okabe and Ito's palette without black and yellow; legible on white and on dark pages.
RUNS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
# Petroff's ten colours (Accessible Color Sequences for Data Visualization, 2021).
CLASSES = (
    "#3f90da", "#ffa90e", "#bd1f01", "#94a4a2", "#832db6", "#a96b59", "#e76300", "#b9ac70", "#717581", "#92dadd",
)  # fmt: skip

SETTINGS: dict[str, Any] = {
    "font.family": "DejaVu Sans",  # comes with Matplotlib, so that all machines draw alike
    "font.size": 8.5,
    "axes.titlesize": 9,
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "axes.labelsize": 8.5,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    "legend.fontsize": 8.5,
    "legend.frameon": False,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.7,
    "xtick.major.width": 0.7,
    "ytick.major.width": 0.7,
    "lines.linewidth": 1.6,
    "lines.markersize": 4,
    "axes.facecolor": "none",
    "image.cmap": "viridis",
    "svg.fonttype": "path",
    "svg.hashsalt": "fedu2",
    **dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), INK),
}


@contextmanager
def styled() -> Iterator[None]:
    """Matplotlib's own defaults with ours laid over them, whatever the user's settings are."""
    with style.context(["default", SETTINGS]), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing")  # of a run's name; a box stands in its place
        yield


def new_figure(height: float) -> Figure:
    """An empty figure of the page's width; `height` in inches."""
    return Figure(figsize=(WIDTH, height), layout="constrained")


def grid(panels: int, height: float, most_columns: int = 3) -> tuple[Figure, list[Axes]]:
    """A figure with a number of equal panels, `height` inches each, in rows that are about equally full."""
    rows = -(-panels // most_columns)
    columns = -(-panels // rows)
    figure = new_figure(rows * height)
    axes = figure.subplots(rows, columns, squeeze=False).ravel()
    for unused in axes[panels:]:
        unused.remove()
    return figure, list(axes[:panels])


def faint(axes: Axes, axis: str = "y") -> None:
    """Hairlines that guide the eye and stay behind the data."""
    axes.grid(axis=axis, color=INK, alpha=0.12, linewidth=0.6)  # type: ignore[arg-type]
    axes.set_axisbelow(True)


def integers(axes: Axes, label: str = "round") -> None:
    """A horizontal axis that counts."""
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True, min_n_ticks=1))
    axes.set_xlabel(label)


def legend(figure: Figure, handles: Sequence[Line2D], beside: bool = False) -> None:
    """Above the panels, or beside them, where it covers nothing; left out where there is nothing to tell apart."""
    if len(handles) > 1:
        longest = max(len(str(handle.get_label())) for handle in handles)
        fitting = max(1, int(72 * WIDTH / (LETTER * longest + 34)))  # a handle takes 34 points
        columns = 1 if beside else min(fitting, len(handles))
        figure.legend(handles=handles, loc="outside right upper" if beside else "outside upper left", ncols=columns)


def titled(axes: Axes, text: str, width: float) -> None:
    """A panel's title in as many lines as `width` inches demand; also names without spaces are broken."""
    axes.set_title("\n".join(wrap(text, max(12, int(72 * width / (1.2 * LETTER))))))


def heat_map(
    axes: Axes,
    values: np.ndarray[Any, Any],
    *,
    limits: tuple[float, float],
    cell: tuple[float, float],
    form: str = "{:.2f}",
    first: int = 0,
) -> AxesImage:
    """A matrix as colours; where a cell (width and height in inches) has room, with its numbers. NaN stays empty.

    first: the number of the first column.
    """
    rows, columns = values.shape
    image = axes.imshow(
        values,
        aspect="auto",
        interpolation="nearest",
        norm=Normalize(*limits),
        extent=(first - 0.5, first + columns - 0.5, rows - 0.5, -0.5),
    )
    axes.set_facecolor((*_rgb(INK), 0.06))
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
    widest = max((len(form.format(v)) for v in values[np.isfinite(values)].ravel()), default=0)
    if 72 * cell[0] >= 5.2 * widest + 3 and 72 * cell[1] >= 11:
        for (row, column), value in np.ndenumerate(values):
            if np.isfinite(value):
                colour = "white" if _luminance(image, value) < 0.45 else "black"
                axes.text(first + column, row, form.format(value), ha="center", va="center", color=colour, fontsize=8)
    return image


def whole_numbers(axes: Axes, shape: tuple[int, ...]) -> None:
    """Ticks of a map of `shape` (rows, columns): never between two rows or columns."""
    for axis, size in ((axes.yaxis, shape[0]), (axes.xaxis, shape[1])):
        axis.set_major_locator(MaxNLocator(nbins=min(10, max(1, size)), integer=True, min_n_ticks=1))


def highest(values: np.ndarray[Any, Any]) -> float:
    """The largest finite value, where a scale ends; 1 where there is none."""
    finite = values[np.isfinite(values)]
    return float(finite.max()) if finite.size else 1.0


def _rgb(colour: str) -> tuple[float, float, float]:
    red, green, blue = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    return red, green, blue


def _luminance(image: ScalarMappable, value: float) -> float:
    red, green, blue, _ = image.to_rgba(np.array([value]))[0]
    return float(0.299 * red + 0.587 * green + 0.114 * blue)
