"""Decorrelation: a penalty on correlated dimensions.

Shi et al., Towards Understanding and Mitigating Dimensional Collapse in Heterogeneous Federated Learning, ICLR 2023.
With X (N, d) the batch, each dimension standardised by its mean and its unbiased variance, and corr = XᵀX/(N − 1):

    code     L = (1/N) mean_{i ≠ j} (XᵀX)_ij² = ((N − 1)²/N) mean_{i ≠ j} corr_ij²
    paper    L = (1/d²) ‖corr‖_F²

The authors' code leaves out the division by N − 1, so its L grows with the batch: dimensions that are all perfectly
correlated give 62.0, 126.0 and 254.0 at N = 64, 128 and 256. In the paper's form they give 1 at any N.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedu2.objectives import Outcome
from fedu2.options import FedDecorrOptions

__all__ = ["Decorrelation", "decorrelation"]

EPS = 1e-8  # added to variances: a dimension without variance correlates with nothing


def decorrelation(x: Tensor, scaling: str) -> Tensor:
    """L of x (..., N, d): one value a batch, (...). A single image shows no correlation: L = 0 for N = 1."""
    n, d = x.shape[-2:]
    freedom = max(n - 1, 1)
    with torch.autocast(x.device.type, enabled=False):
        centred = x.float() - x.float().mean(-2, keepdim=True)
        variance = centred.square().sum(-2, keepdim=True) / freedom
        standard = centred * (variance + EPS).rsqrt()
        products = standard.mT @ standard  # (..., d, d)
        if scaling == "paper":
            return products.square().sum((-2, -1)) / (d * freedom) ** 2
        itself = torch.eye(d, dtype=torch.bool, device=x.device)
        pairs = max(d * (d - 1), 1)
        return products.masked_fill(itself, 0).square().sum((-2, -1)) / (pairs * n)


@dataclass(frozen=True)
class Decorrelation:
    """β (L(Z¹) + L(Z²)) on the projections or the features; the two views share one batched product."""

    options: FedDecorrOptions

    def __call__(
        self, outcome: Outcome, generator: torch.Generator, progress: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The weighted term; logged is the mean of L over the two views."""
        views = outcome.projections if self.options.output == "projector" else outcome.features
        loss = decorrelation(torch.stack(views), self.options.scaling)  # (2,)
        return self.options.weight * loss.sum(), {"feddecorr.loss": loss.detach().mean()}
