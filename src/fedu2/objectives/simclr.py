"""SimCLR: Chen et al., A Simple Framework for Contrastive Learning of Visual Representations, ICML 2020."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedu2.experiment import Experiment
from fedu2.objectives.base import Objective, Outcome, objectives
from fedu2.objectives.heads import projector

__all__ = ["SimCLR", "contrast", "nt_xent"]


def nt_xent(z1: Tensor, z2: Tensor, temperature: float) -> Tensor:
    """Normalised temperature-scaled cross entropy over the 2N views of a batch, for z1, z2 of shape (N, d).

    ℓ(i, j) = −log exp(s_ij/τ) / Σ_{k ≠ i} exp(s_ik/τ),  s = cosine similarity, j the other view of i; the mean over i.
    """
    return contrast(F.normalize(torch.cat([z1, z2]).float(), dim=1), temperature)


def contrast(z: Tensor, temperature: float) -> Tensor:
    """`nt_xent` of unit vectors (2N, d), the first views before the second ones."""
    with torch.autocast(z.device.type, enabled=False):  # cosines over a small τ need more than half precision
        similarity = (z @ z.T / temperature).fill_diagonal_(float("-inf"))  # (2N, 2N)
    partner = torch.arange(len(z), device=z.device).roll(len(z) // 2)
    return F.cross_entropy(similarity, partner)


@objectives.register("simclr")
class SimCLR(Objective):
    """ℓ_a = NT-Xent of the projections."""

    def __init__(self, encoder: nn.Module, experiment: Experiment) -> None:
        super().__init__()
        self.encoder = encoder
        self.projector = projector(encoder, experiment.heads)
        self.temperature = experiment.simclr.temperature

    def forward(self, view1: Tensor, view2: Tensor) -> Outcome:
        h1, h2 = self.both(self.encoder, view1, view2)  # (N, D)
        z1, z2 = self.both(self.projector, h1, h2)  # (N, d)
        return Outcome(nt_xent(z1, z2, self.temperature), (h1, h2), (z1, z2))
