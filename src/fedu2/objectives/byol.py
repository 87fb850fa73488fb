"""BYOL: Grill et al., Bootstrap Your Own Latent, NeurIPS 2020."""

from __future__ import annotations

import copy
import math

import torch
from torch import Tensor, nn

from fedu2.experiment import Experiment
from fedu2.objectives.base import Objective, Outcome, objectives
from fedu2.objectives.heads import predictor, projector
from fedu2.objectives.simsiam import negative_cosine
from fedu2.options import BYOLOptions

__all__ = ["BYOL", "momentum_at"]


def momentum_at(options: BYOLOptions, progress: float) -> float:
    """m: constant, or 1 − (1 − m)·(cos(π·progress) + 1)/2, which rises to 1 over the rounds."""
    if options.momentum_schedule == "constant":
        return options.momentum
    return 1 - (1 - options.momentum) * (math.cos(math.pi * progress) + 1) / 2


@objectives.register("byol")
class BYOL(Objective):
    """ℓ_a = mean_i [(2 − 2 cos(p1, z'2)) + (2 − 2 cos(p2, z'1))], z' = projections of the target network.

    The target θ' follows the online encoder and projector θ after every step: θ' ← m θ' + (1 − m) θ. It normalises
    by batch statistics, as the online network does; its running statistics are its own.
    """

    has_target = True

    def __init__(self, encoder: nn.Module, experiment: Experiment) -> None:
        super().__init__()
        self.encoder = encoder
        self.projector = projector(encoder, experiment.heads)
        self.predictor = predictor(encoder, experiment.heads)
        self.target = nn.Sequential(copy.deepcopy(self.encoder), copy.deepcopy(self.projector)).requires_grad_(False)
        self.options = experiment.byol

    def forward(self, view1: Tensor, view2: Tensor) -> Outcome:
        h1, h2 = self.both(self.encoder, view1, view2)  # (N, D)
        z1, z2 = self.both(self.projector, h1, h2)  # (N, d)
        p1, p2 = self.both(self.predictor, z1, z2)  # (N, d)
        with torch.no_grad():
            t1, t2 = self.both(self.target, view1, view2)  # (N, d)
        loss = 4 + 2 * negative_cosine(p1, t2) + 2 * negative_cosine(p2, t1)
        return Outcome(loss, (h1, h2), (z1, z2), (p1, p2))

    @torch.no_grad()
    def start(self) -> None:
        """Target = online, for a client that has no target of its own yet."""
        for target, online in zip(self._target(), self._online(), strict=True):
            target.copy_(online)
        for target, online in zip(self.target.buffers(), self._online_buffers(), strict=True):
            target.copy_(online)

    def tempo(self, progress: float) -> float:
        """m."""
        return momentum_at(self.options, progress)

    @torch.no_grad()
    def after_step(self, progress: float) -> None:
        """θ' ← m θ' + (1 − m) θ."""
        torch._foreach_lerp_(self._target(), self._online(), 1 - self.tempo(progress))

    def _target(self) -> list[Tensor]:
        return list(self.target.parameters())

    def _online(self) -> list[Tensor]:
        return [*self.encoder.parameters(), *self.projector.parameters()]

    def _online_buffers(self) -> list[Tensor]:
        return [*self.encoder.buffers(), *self.projector.buffers()]
