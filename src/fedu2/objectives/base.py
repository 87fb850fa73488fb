"""What every self-supervised objective ℓ_a offers: a loss for two views, and its representations for regularisers.

An objective is a module. Its children are the *sections* of a model (`encoder`, `projector`, ...), each of which is
trained as a whole or not at all, and travels between client and server or stays where it is.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn

from fedu2.experiment import Experiment
from fedu2.registry import Registry

__all__ = ["Objective", "Outcome", "objectives"]


@dataclass(frozen=True)
class Outcome:
    """What one pass over two views gives.

    loss: ℓ_a, a scalar.  features: F(x), (N, D) for each view.  projections: G(F(x)), (N, d) for each view.
    """

    loss: Tensor
    features: tuple[Tensor, Tensor]
    projections: tuple[Tensor, Tensor]


class Objective(nn.Module, ABC):
    """A self-supervised objective together with the networks that it trains."""

    encoder: nn.Module
    projector: nn.Module

    @abstractmethod
    def forward(self, view1: Tensor, view2: Tensor) -> Outcome:
        """The loss of two views (N, 3, S, S) of the same images."""

    def start(self) -> None:
        """Called when a client begins without memory of its own: derive what is not sent from what is."""

    def after_step(self, progress: float) -> None:
        """Called after every optimizer step; `progress` is the share of rounds that are over, in [0, 1)."""


objectives: Registry[Callable[[nn.Module, Experiment], Objective]] = Registry("objective")
