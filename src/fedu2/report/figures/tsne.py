"""Global and local representations in one plane (the paper's figure 3)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from fedu2.report.drawing import Drawing
from fedu2.report.figures.base import figures
from fedu2.report.snapshot import Snapshot, evenly
from fedu2.report.style import CLASSES, INK, RUNS, WIDTH, grid, legend, titled
from fedu2.report.subject import Subject, images_of, pictured

__all__ = ["tsne"]

IMAGES = 200
ASPECT = 0.75  # of a panel: t-SNE begins with the principal directions, so it is wider than high
Points = np.ndarray[Any, np.dtype[np.float64]]


@figures.register("tsne")
def tsne(subjects: Sequence[Subject]) -> Drawing | None:
    """t-SNE of global and local representations of the same images together; a panel a run."""
    shown = pictured(subjects)
    width = (WIDTH - 1.3) / min(len(shown), 2)  # beside the legend
    figure, panels = grid(len(shown), height=ASPECT * width + 0.3, most_columns=2)
    handles = [
        Line2D([], [], color=INK, marker="o", markersize=4.5, linestyle="", label="global model"),
        Line2D([], [], color=INK, marker="x", markersize=4.5, linestyle="", label="local models"),
    ]
    seen: dict[int, str] = {}
    for axes, (subject, taken) in zip(panels, shown, strict=True):
        seen |= _scatter_tsne(axes, taken)
        titled(axes, subject.label, width)
    handles += [
        Line2D([], [], color=CLASSES[label % len(CLASSES)], marker="s", markersize=5, linestyle="", label=name)
        for label, name in sorted(seen.items())
    ]
    legend(figure, handles, beside=True)
    few = any(taken.labels is not None and int(taken.labels.max()) >= len(CLASSES) for _, taken in shown)
    caption = (
        f"t-SNE of representations of {images_of(shown)} by the global model (circles) and, of the same images, by"
        f" local models (crosses), coloured by class{' (the first ten)' if few else ''}. Where circles and crosses lie"
        " apart, the clients have drifted from the global model."
    )
    return Drawing("tsne", "Global and local representations", caption, figure)


def _scatter_tsne(axes: Axes, taken: Snapshot) -> dict[int, str]:
    """Draw one run; the classes that are to be seen."""
    labels = taken.labels
    candidates = torch.arange(len(taken.features)) if labels is None else (labels < len(CLASSES)).nonzero().squeeze(1)
    of_candidates = None if labels is None else labels[candidates]
    images = candidates[evenly(len(candidates), IMAGES, of_candidates)]
    client = torch.arange(len(images)) % len(taken.clients)  # each local model has its turn
    both = torch.cat([taken.features[images], taken.local[client, images]])
    points = _embed(F.normalize(both.double(), dim=1).numpy())
    by_global, by_local = np.split(points, 2)
    colours = [RUNS[0]] * len(images), [RUNS[1]] * len(images)
    if labels is not None:
        colours = ([CLASSES[int(label)] for label in labels[images]],) * 2
    axes.scatter(by_global[:, 0], by_global[:, 1], s=15, c=colours[0], linewidths=0, alpha=0.85)
    axes.scatter(by_local[:, 0], by_local[:, 1], s=15, c=colours[1], marker="x", linewidths=0.9)
    axes.set(xticks=[], yticks=[])
    _frame(axes, points)
    axes.spines[:].set(visible=True, alpha=0.3)
    if labels is None:
        return {}
    names = taken.classes
    return {label: names[label] if label < len(names) else str(label) for label in labels[images].unique().tolist()}


def _frame(axes: Axes, points: Points) -> None:
    """All points in a frame of fixed shape, with distances alike in all directions."""
    middle, (width, height) = (points.min(0) + points.max(0)) / 2, np.ptp(points, axis=0)
    reach = 0.54 * max(width, height / ASPECT) or 1.0
    axes.set(xlim=(middle[0] - reach, middle[0] + reach))
    axes.set(ylim=(middle[1] - ASPECT * reach, middle[1] + ASPECT * reach))
    axes.set_box_aspect(ASPECT)


def _embed(vectors: Points) -> Points:
    """Two dimensions by t-SNE; always the same ones (on one thread, for sums are taken in the order of threads)."""
    from sklearn.manifold import TSNE  # type: ignore[import-untyped]
    from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

    if not np.ptp(vectors, axis=0).any():
        return np.zeros((len(vectors), 2))  # complete collapse
    perplexity = min(30.0, (len(vectors) - 1) / 3)
    with threadpool_limits(1):
        found: Points = TSNE(perplexity=perplexity, init="pca", random_state=0).fit_transform(vectors)
    return found
