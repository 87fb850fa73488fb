"""FUR as a term of a client's loss."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedu2.objectives import Outcome
from fedu2.options import FUROptions
from fedu2.regularizers.fur import fur

__all__ = ["FUR", "weight_at"]


@dataclass(frozen=True)
class FUR:
    """λ_U (ℓ_u(Z¹) + ℓ_u(Z²)) on the projections or the features; the two views are solved in one batch."""

    options: FUROptions

    def __call__(
        self, outcome: Outcome, generator: torch.Generator, progress: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The weighted term. Logged: means over the views of ℓ_u, matched mass, solver's gap; λ_U if it moves."""
        views = outcome.projections if self.options.output == "projector" else outcome.features
        result = fur(torch.stack(views), generator, self.options)  # (2,) each
        logged = {
            "fur.loss": result.loss.detach().mean(),
            "fur.mass": result.mass.mean(),
            "fur.gap": result.gap.mean(),
        }
        weight = weight_at(self.options, progress)
        if isinstance(weight, Tensor):
            logged["fur.weight"] = weight
        return weight * result.loss.sum(), logged


def weight_at(options: FUROptions, progress: Tensor) -> float | Tensor:
    """λ_U: constant, or λ_U · ½(1 + cos(πp)) with p = progress/until, at most 1: it falls to 0, and stays there."""
    if options.schedule != "cosine":
        return options.weight
    return options.weight * (1 + torch.cos(torch.pi * (progress / options.until).clamp(max=1))) / 2
