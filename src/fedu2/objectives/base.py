"""What every self-supervised objective ℓ_a offers: a loss for two views, and its representations for regularisers.

An objective is a module. Its children are the *sections* of a model (`encoder`, `projector`, ...), each of which is
trained as a whole or not at all, and travels between client and server or stays where it is.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from fedu2.experiment import Experiment
from fedu2.models.norm import grouped
from fedu2.registry import Registry

__all__ = ["Objective", "Outcome", "objectives"]


@dataclass(frozen=True)
class Outcome:
    """What one pass over two views gives.

    loss: ℓ_a, a scalar.  features: F(x), (N, D) for each view.  projections: G(F(x)), (N, d) for each view.
    predictions: what a predictor makes of them, (N, d) for each view.  terms: scalars to log.
    """

    loss: Tensor
    features: tuple[Tensor, Tensor]
    projections: tuple[Tensor, Tensor]
    predictions: tuple[Tensor, Tensor] | None = None
    terms: Mapping[str, Tensor] = field(default_factory=dict)


class Objective(nn.Module, ABC):
    """A self-supervised objective together with the networks that it trains."""

    encoder: nn.Module
    projector: nn.Module
    rotation: nn.Module  # the head of the rotation task, where that is asked for
    has_target: bool = False  # a section `target`, which travels, stays or begins afresh as `byol.target` says
    paired: bool = False  # both views in one pass; needs networks whose only norms are ours (`only_our_norms`)

    @abstractmethod
    def forward(self, view1: Tensor, view2: Tensor) -> Outcome:
        """The loss of two views (N, 3, S, S) of the same images."""

    def both(self, module: nn.Module, view1: Tensor, view2: Tensor) -> tuple[Tensor, Tensor]:
        """Two passes through `module`, or one over both batches, stacked; each is normalised by itself either way."""
        out1, out2 = self.together(module, view1, view2)
        return out1, out2

    def together(self, module: nn.Module, *batches: Tensor) -> tuple[Tensor, ...]:
        """The same for any number of batches of one size."""
        if not self.paired:
            return tuple(module(batch) for batch in batches)
        with grouped(module, len(batches)):
            return module(torch.cat(batches)).chunk(len(batches))  # type: ignore[no-any-return]

    def start(self) -> None:
        """Called when a client begins without a target of its own: derive what is not sent from what is."""

    def tempo(self, progress: float) -> float:
        """The number through which `progress` enters `after_step`; while it stays, a captured step stays good."""
        return 0.0

    def after_step(self, progress: float) -> None:
        """Called after every optimizer step; `progress` is the share of rounds that are over, in [0, 1)."""


objectives: Registry[Callable[[nn.Module, Experiment], Objective]] = Registry("objective")
