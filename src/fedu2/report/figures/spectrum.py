"""The spectrum of representations (the paper's figure 1)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from matplotlib.lines import Line2D
from torch import Tensor

from fedu2.evaluation.collapse import spectrum as covariance_spectrum
from fedu2.report.drawing import Drawing
from fedu2.report.figures.base import figures
from fedu2.report.style import INK, RUNS, faint, grid, legend
from fedu2.report.subject import Subject, images_of, pictured
from fedu2.seeds import generator

__all__ = ["spectrum"]

TOP = 100  # singular values shown
DASHES = ("-", (0, (5, 1.5)), (0, (1.5, 1.2)), (0, (6, 1.5, 1.5, 1.5)))


@figures.register("spectrum")
def spectrum(subjects: Sequence[Subject]) -> Drawing | None:
    """log₁₀ of the largest singular values of the covariance, global and local models; a line a run."""
    shown = pictured(subjects)
    top = min(TOP, max(taken.features.shape[1] for _, taken in shown))
    step = max(1, top // 5)
    figure, (left, right) = grid(2, height=2.9)
    right.sharey(left)
    handles = []
    for number, (subject, taken) in enumerate(shown):
        style: dict[str, Any] = {"color": subject.colour, "linestyle": DASHES[number // len(RUNS) % len(DASHES)]}
        local = np.stack([_logarithms(features) for features in taken.local])  # (C, top)
        indices = np.arange(1, local.shape[1] + 1)
        left.plot(indices, _logarithms(taken.features), **style)
        right.plot(indices, local.mean(0), **style)
        right.fill_between(indices, local.min(0), local.max(0), color=subject.colour, alpha=0.18, linewidth=0)
        handles.append(Line2D([], [], **style, label=subject.label))
    for images, dimension in sorted({tuple(taken.features.shape) for _, taken in shown}):
        values = _logarithms(_gaussian(images, dimension))
        for axes in (left, right):
            axes.plot(np.arange(1, len(values) + 1), values, color=INK, linestyle=":", linewidth=1.2)
    handles.append(Line2D([], [], color=INK, linestyle=":", linewidth=1.2, label="Gaussian samples"))
    for axes, title in ((left, "global model"), (right, "local models: mean and range")):
        axes.set_title(title)
        axes.set_xlabel("index of the singular value")
        axes.set_xticks([1, *range(step, top + 1, step)])
        faint(axes)
    left.set_ylabel("log$_{10}$ singular value")
    legend(figure, handles)
    caption = (
        f"The {top} largest singular values of the covariance of l2-normalised representations of {images_of(shown)}."
        " The nearer to the flat line of Gaussian samples, as many and normalised alike, the more directions are in"
        " use; a steep fall is dimensional collapse."
    )
    return Drawing("spectrum", "Singular values of the representations", caption, figure)


def _logarithms(features: Tensor) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """log₁₀ of the largest values of the spectrum; rounding errors of vanished ones are no values."""
    values = covariance_spectrum(features)[:TOP]
    floor = 1e-14 * float(values.max()) if len(values) else 0.0
    return torch.where(values > floor, values, torch.nan).log10().numpy()


def _gaussian(images: int, dimension: int) -> Tensor:
    return torch.randn(images, dimension, generator=generator("cpu", 0, "gaussian reference"))
