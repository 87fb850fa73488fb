"""BYOL: Grill et al., Bootstrap Your Own Latent, NeurIPS 2020."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from fedu2.experiment import Experiment
from fedu2.objectives.base import Objective, Outcome, objectives
from fedu2.objectives.heads import predictor, projector
from fedu2.objectives.simsiam import negative_cosine
from fedu2.objectives.target import Target
from fedu2.options import BYOLOptions

__all__ = ["BYOL", "byol_loss", "momentum_at"]


def momentum_at(options: BYOLOptions, progress: float) -> float:
    """m: constant, or 1 − (1 − m)·(cos(π·progress) + 1)/2, which rises to 1 over the rounds."""
    if options.momentum_schedule == "constant":
        return options.momentum
    return 1 - (1 - options.momentum) * (math.cos(math.pi * progress) + 1) / 2


def byol_loss(predictions: tuple[Tensor, Tensor], targets: tuple[Tensor, Tensor]) -> Tensor:
    """mean_i [(2 − 2 cos(p1, z'2)) + (2 − 2 cos(p2, z'1))] of predictions p and target projections z', all (N, d)."""
    (p1, p2), (t1, t2) = predictions, targets
    return 4 + 2 * negative_cosine(p1, t2) + 2 * negative_cosine(p2, t1)


@objectives.register("byol")
class BYOL(Objective):
    """ℓ_a = `byol_loss` of the online network's predictions and the target network's projections.

    The target θ' follows the online encoder and projector θ after every step: θ' ← m θ' + (1 − m) θ. It normalises
    by batch statistics, as the online network does; its running statistics are its own.
    """

    has_target = True

    def __init__(self, encoder: nn.Module, experiment: Experiment) -> None:
        super().__init__()
        self.encoder = encoder
        self.projector = projector(encoder, experiment.heads)
        self.predictor = predictor(encoder, experiment.heads)
        self.target = Target(self.encoder, self.projector)
        self.options = experiment.byol

    def forward(self, view1: Tensor, view2: Tensor) -> Outcome:
        h1, h2 = self.both(self.encoder, view1, view2)  # (N, D)
        z1, z2 = self.both(self.projector, h1, h2)  # (N, d)
        p1, p2 = self.both(self.predictor, z1, z2)  # (N, d)
        with torch.no_grad():
            t1, t2 = self.both(self.target, view1, view2)  # (N, d)
        return Outcome(byol_loss((p1, p2), (t1, t2)), (h1, h2), (z1, z2), (p1, p2))

    def start(self) -> None:
        """Target = online, for a client that has no target of its own yet."""
        self.target.start(self.encoder, self.projector)

    def tempo(self, progress: float) -> float:
        """m."""
        return momentum_at(self.options, progress)

    def after_step(self, progress: float) -> None:
        """θ' ← m θ' + (1 − m) θ."""
        self.target.follow(self.encoder, self.projector, self.tempo(progress))
