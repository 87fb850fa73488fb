"""What a figure is: a function from runs to a drawing, or to nothing where the runs hold nothing for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fedu2.registry import Registry
from fedu2.report.drawing import Drawing
from fedu2.report.subject import Subject

__all__ = ["MakeFigure", "figures"]

MakeFigure = Callable[[Sequence[Subject]], Drawing | None]

figures: Registry[MakeFigure] = Registry("figure")
