"""FUR as a term of a client's loss."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from fedu2.objectives import Outcome
from fedu2.options import FUROptions
from fedu2.regularizers.fur import fur_toward, sphere_points
from fedu2.seeds import derive

__all__ = ["FUR", "weight_at"]


@dataclass(frozen=True)
class FUR:
    """λ_U (ℓ_u(Z¹) + ℓ_u(Z²)) on the projections or the features; the two views are solved in one batch."""

    options: FUROptions
    seed: int = 0  # of references that are fixed, the same for all clients
    _fixed: dict[tuple[torch.Size, torch.device], Tensor] = field(default_factory=dict, compare=False, repr=False)

    def __call__(
        self, outcome: Outcome, generator: torch.Generator, progress: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The weighted term. Logged: means over the views of ℓ_u, matched mass, solver's gap; λ_U if it moves."""
        views = outcome.projections if self.options.output == "projector" else outcome.features
        z = torch.stack(views)
        result = fur_toward(z, self.references(z, generator), self.options)  # (2,) each
        logged = {
            "fur.loss": result.loss.detach().mean(),
            "fur.mass": result.mass.mean(),
            "fur.gap": result.gap.mean(),
        }
        weight = weight_at(self.options, progress)
        if isinstance(weight, Tensor):
            logged["fur.weight"] = weight
        return weight * result.loss.sum(), logged

    def references(self, z: Tensor, generator: torch.Generator) -> Tensor:
        """M points for z (2, N, d): (2, M, d) fresh ones, or (M, d) that stay the same, kept for captured steps."""
        shape = torch.Size((self.options.references or z.shape[-2], z.shape[-1]))
        if self.options.draw == "fresh":
            return sphere_points((len(z), *shape), generator)
        key = shape, z.device
        if key not in self._fixed:
            source = torch.Generator().manual_seed(derive(self.seed, "references"))
            self._fixed[key] = sphere_points(shape, source).to(z.device)
        return self._fixed[key]


def weight_at(options: FUROptions, progress: Tensor) -> float | Tensor:
    """λ_U: constant, or λ_U · ½(1 + cos(πp)) with p = progress/until, at most 1: it falls to 0, and stays there."""
    if options.schedule != "cosine":
        return options.weight
    return options.weight * (1 + torch.cos(torch.pi * (progress / options.until).clamp(max=1))) / 2
