"""FUR as a term of a client's loss."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedu2.objectives import Outcome
from fedu2.options import FUROptions
from fedu2.regularizers.fur import fur

__all__ = ["FUR"]


@dataclass(frozen=True)
class FUR:
    """λ_U (ℓ_u(Z¹) + ℓ_u(Z²)) on the projections or the features; the two views are solved in one batch."""

    options: FUROptions

    def __call__(self, outcome: Outcome, generator: torch.Generator) -> tuple[Tensor, dict[str, Tensor]]:
        """The weighted term; logged are the mean over the two views of ℓ_u, the matched mass and the solver's gap."""
        views = outcome.projections if self.options.output == "projector" else outcome.features
        result = fur(torch.stack(views), generator, self.options)  # (2,) each
        logged = {
            "fur.loss": result.loss.detach().mean(),
            "fur.mass": result.mass.mean(),
            "fur.gap": result.gap.mean(),
        }
        return self.options.weight * result.loss.sum(), logged
