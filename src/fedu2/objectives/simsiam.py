"""SimSiam: Chen and He, Exploring Simple Siamese Representation Learning, CVPR 2021."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from fedu2.experiment import Experiment
from fedu2.objectives.base import Objective, Outcome, objectives
from fedu2.objectives.heads import predictor, projector

__all__ = ["SimSiam", "negative_cosine"]


def negative_cosine(p: Tensor, z: Tensor) -> Tensor:
    """−mean_i cos(p_i, sg z_i) for p, z of shape (N, d); no gradient reaches z."""
    return -F.cosine_similarity(p.float(), z.detach().float(), dim=1).mean()


@objectives.register("simsiam")
class SimSiam(Objective):
    """ℓ_a = ½ [D(p1, sg z2) + D(p2, sg z1)] with the negative cosine D."""

    def __init__(self, encoder: nn.Module, experiment: Experiment) -> None:
        super().__init__()
        self.encoder = encoder
        self.projector = projector(encoder, experiment.heads)
        self.predictor = predictor(encoder, experiment.heads)

    def forward(self, view1: Tensor, view2: Tensor) -> Outcome:
        h1, h2 = self.both(self.encoder, view1, view2)  # (N, D)
        z1, z2 = self.both(self.projector, h1, h2)  # (N, d)
        p1, p2 = self.both(self.predictor, z1, z2)  # (N, d)
        loss = (negative_cosine(p1, z2) + negative_cosine(p2, z1)) / 2
        return Outcome(loss, (h1, h2), (z1, z2), (p1, p2))
