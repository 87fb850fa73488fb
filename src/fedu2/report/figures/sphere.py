"""Representations on a sphere in three dimensions (the paper's figure 2), and how much of it they cover."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from torch import Tensor

from fedu2.report.drawing import Drawing
from fedu2.report.figures.base import figures
from fedu2.report.snapshot import Snapshot, evenly
from fedu2.report.style import INK, WIDTH, grid, legend, titled
from fedu2.report.subject import Subject, images_of, pictured
from fedu2.seeds import generator

__all__ = ["coverage", "on_sphere", "sphere"]

IMAGES = 1000
GREY = "#808890"  # of the reference, no run's colour
BANDS, SECTORS = 12, 24
FIELDS = BANDS * SECTORS  # fields of equal area: bands of equal height have equal area (Archimedes)
AZIMUTH, ELEVATION = np.radians(-55), np.radians(22)  # of the viewer

Points = np.ndarray[Any, np.dtype[np.float64]]


@figures.register("sphere")
def sphere(subjects: Sequence[Subject]) -> Drawing | None:
    """The global model's representations on the sphere of their three principal directions; a panel a run."""
    shown = pictured(subjects)
    clouds = [(subject.label, _points(taken), subject.colour) for subject, taken in shown]
    count = max(len(points) for _, points, _ in clouds)
    noise = torch.randn(count, 3, generator=generator("cpu", 0, "uniform reference"), dtype=torch.float64)
    clouds.append(("uniform, for reference", F.normalize(noise, dim=1).numpy(), GREY))
    figure, panels = grid(len(clouds), height=2.75)
    for axes, (label, points, colour) in zip(panels, clouds, strict=True):
        _draw(axes, points, colour)
        titled(axes, label, WIDTH / 3 - 0.2)
        axes.set_xlabel(f"covers {100 * coverage(points):.0f} %")
    handles = [
        Line2D([], [], color=INK, marker="o", markersize=4, linestyle="", label="front"),
        Line2D(
            [], [], color=INK, marker="o", markersize=4, linestyle="", markerfacecolor="none", alpha=0.5, label="back"
        ),
    ]
    legend(figure, handles)
    caption = (
        f"Representations of {images_of(shown)} by the global model, l2-normalised, projected on their three principal"
        " directions and back onto the sphere: blank space is collapse. Covered is the share of"
        f" {FIELDS} fields of equal area that hold a point."
    )
    return Drawing("sphere", "Representations on the sphere", caption, figure)


def _points(taken: Snapshot) -> Points:
    return on_sphere(taken.features[evenly(len(taken.features), IMAGES, taken.labels)])


def on_sphere(features: Tensor) -> Points:
    """Features (N, D) → unit vectors (N, 3): l2-normalised, on their three principal directions, normalised again.

    The directions are those of the centred features; their signs are such that each coordinate is skewed upwards.
    """
    z = F.normalize(features.double(), dim=1)
    z = z - z.mean(dim=0)
    _, _, directions = torch.linalg.svd(z, full_matrices=False)
    flat = z @ directions[:3].T
    flat = F.pad(flat, (0, 3 - flat.shape[1]))  # of features with fewer dimensions
    flat = flat * torch.where(flat.pow(3).sum(0) < 0, -1.0, 1.0)
    points: Points = F.normalize(flat, dim=1).numpy()
    return points


def coverage(points: Points) -> float:
    """The share of the sphere's fields of equal area that hold a point of (N, 3); the first direction is the axis."""
    band = np.clip((points[:, 0] + 1) / 2 * BANDS, 0, BANDS - 1).astype(int)
    angle = np.arctan2(points[:, 2], points[:, 1]) / (2 * np.pi) % 1
    sector = np.minimum((angle * SECTORS).astype(int), SECTORS - 1)
    return len(np.unique(band * SECTORS + sector)) / FIELDS


def _draw(axes: Axes, points: Points, colour: str) -> None:
    """A globe with its lines; points in front are filled, those at the back hollow and faint."""
    axes.set(aspect="equal", xlim=(-1.06, 1.06), ylim=(-1.06, 1.06), xticks=[], yticks=[])
    axes.spines[:].set_visible(False)
    turn = np.linspace(0, 2 * np.pi, 181)
    for line in _graticule(turn):
        right, up, toward = _seen(line)
        for side, alpha in ((toward >= 0, 0.28), (toward < 0, 0.09)):
            axes.plot(np.where(side, right, np.nan), np.where(side, up, np.nan), color=INK, alpha=alpha, linewidth=0.5)
    axes.plot(np.cos(turn), np.sin(turn), color=INK, alpha=0.6, linewidth=0.8)
    right, up, toward = _seen(points)
    back, front = toward < 0, toward >= 0
    axes.scatter(right[back], up[back], s=7, facecolors="none", edgecolors=colour, linewidths=0.5, alpha=0.4)
    axes.scatter(right[front], up[front], s=8, color=colour, linewidths=0, alpha=0.85, zorder=3)


def _graticule(turn: Points) -> list[Points]:
    """Parallels and meridians every 30 degrees, as lines of points (181, 3)."""
    zero = np.zeros_like(turn)
    parallels = [
        np.stack([np.cos(a) * np.cos(turn), np.cos(a) * np.sin(turn), zero + np.sin(a)], 1)
        for a in np.radians(range(-60, 90, 30))
    ]
    meridians = [
        np.stack([np.cos(turn) * np.cos(a), np.cos(turn) * np.sin(a), np.sin(turn)], 1)
        for a in np.radians(range(0, 180, 30))
    ]
    return [*parallels, *meridians]


def _seen(points: Points) -> tuple[Points, Points, Points]:
    """Points (N, 3) as the viewer sees them: to the right, upwards, and toward the eye."""
    a, e = AZIMUTH, ELEVATION
    right = np.array([-np.sin(a), np.cos(a), 0])
    up = np.array([-np.sin(e) * np.cos(a), -np.sin(e) * np.sin(a), np.cos(e)])
    eye = np.array([np.cos(e) * np.cos(a), np.cos(e) * np.sin(a), np.sin(e)])
    return points @ right, points @ up, points @ eye
