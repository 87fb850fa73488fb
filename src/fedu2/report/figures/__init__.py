"""The figures by name; a function of your own joins them with `@figures.register("mine")`."""

from __future__ import annotations

from fedu2.report.figures import agreement, eua, partition, rounds, spectrum, sphere, tsne  # noqa: F401  (they register on import)
from fedu2.report.figures.base import MakeFigure, figures
from fedu2.report.figures.sweep import Point, sweep

__all__ = ["ORDER", "MakeFigure", "Point", "figures", "sweep"]

ORDER = ("curves", "spectrum", "sphere", "tsne", "agreement", "fur", "eua", "partition")

figures.seal()
