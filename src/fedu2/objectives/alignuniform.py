"""Alignment and uniformity: Wang and Isola, Understanding Contrastive Representation Learning through Alignment and
Uniformity on the Hypersphere, ICML 2020.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedu2.experiment import Experiment
from fedu2.objectives.base import Objective, Outcome, objectives
from fedu2.objectives.heads import projector

__all__ = ["AlignUniform", "alignment", "on_sphere", "uniformity"]


def on_sphere(z: Tensor) -> Tensor:
    """z (..., d) at length 1, in float32. A vector of length zero has no direction; eps bounds its gradient."""
    return F.normalize(z.float(), dim=-1, eps=1e-6)


def alignment(z1: Tensor, z2: Tensor) -> Tensor:
    """mean_i ‖z1_i − z2_i‖² of unit vectors (N, d)."""
    return (z1 - z2).square().sum(-1).mean()


def uniformity(z: Tensor, t: float) -> Tensor:
    """log mean_{i ≠ j} exp(−t ‖z_i − z_j‖²) of unit vectors z (..., N, d) with N ≥ 2: one value a batch, (...)."""
    n = z.shape[-2]
    with torch.autocast(z.device.type, enabled=False):
        # No distance depends on the mean, but a product in TF32 would round away what differs between near points.
        centred = z - z.detach().mean(-2, keepdim=True)
        squares = centred.square().sum(-1)  # (..., N)
        distances = squares[..., :, None] + squares[..., None, :] - 2 * centred @ centred.mT  # (..., N, N)
        itself = torch.eye(n, dtype=torch.bool, device=z.device)
        exponents = (-t * distances).masked_fill(itself, float("-inf"))
        return exponents.flatten(-2).logsumexp(-1) - math.log(n * (n - 1))


@objectives.register("alignuniform")
class AlignUniform(Objective):
    """ℓ_a = L_align(z1, z2) + β ½ [L_uniform(z1) + L_uniform(z2)] on l2-normalised projections."""

    def __init__(self, encoder: nn.Module, experiment: Experiment) -> None:
        super().__init__()
        self.encoder = encoder
        self.projector = projector(encoder, experiment.heads)
        self.options = experiment.alignuniform

    def forward(self, view1: Tensor, view2: Tensor) -> Outcome:
        h1, h2 = self.both(self.encoder, view1, view2)  # (N, D)
        z1, z2 = self.both(self.projector, h1, h2)  # (N, d)
        unit = on_sphere(torch.stack([z1, z2]))  # (2, N, d)
        align = alignment(unit[0], unit[1])
        uniform = uniformity(unit, self.options.t).mean()
        terms = {"alignuniform.align": align.detach(), "alignuniform.uniform": uniform.detach()}
        return Outcome(align + self.options.weight * uniform, (h1, h2), (z1, z2), terms=terms)
