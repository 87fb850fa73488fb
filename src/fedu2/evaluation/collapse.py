"""How collapsed a representation is, and how well aligned and uniform on the sphere.

References: Roy and Vetterli, The Effective Rank, EUSIPCO 2007; Wang and Isola, Understanding Contrastive Representation
Learning through Alignment and Uniformity on the Hypersphere, ICML 2020; Jing et al., Understanding Dimensional Collapse
in Contrastive Self-Supervised Learning, ICLR 2022.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fedu2.evaluation.sphere import on_sphere

__all__ = ["alignment", "effective_rank", "spectrum", "spread", "uniformity"]


def spectrum(features: Tensor) -> Tensor:
    """Singular values of the covariance of l2-normalised features (N, D), descending: (D,)."""
    z = on_sphere(features.double())
    z = z - z.mean(dim=0)
    covariance = z.T @ z / len(z)
    eigenvalues: Tensor = torch.linalg.eigvalsh(covariance)
    return eigenvalues.flip(0).clamp_min(0)


def effective_rank(features: Tensor) -> float:
    """exp(−Σ p_i log p_i) with p = σ/Σσ and σ the singular values of the centred, l2-normalised features (N, D).

    Between 1 (complete collapse) and min(N − 1, D); σ² are the values of `spectrum`, but for the factor N.
    """
    sigma = spectrum(features).sqrt()
    if float(sigma.sum()) <= 1e-12:
        return 1.0
    p = sigma / sigma.sum()
    return float(torch.special.entr(p).sum().exp())


def spread(features: Tensor) -> float:
    """E‖z − E z‖² of l2-normalised features (N, D), the sum of `spectrum`: 0 when all images have the same direction.

    The effective rank does not show that: it is of what is left beside the mean, and be it rounding.
    """
    z = on_sphere(features.double())
    return float((z - z.mean(dim=0)).square().sum(dim=1).mean())


def alignment(z1: Tensor, z2: Tensor) -> float:
    """E‖z1 − z2‖² over positive pairs, both l2-normalised, (N, D): 0 when views of an image coincide."""
    return float((on_sphere(z1.float()) - on_sphere(z2.float())).square().sum(1).mean())


def uniformity(features: Tensor, t: float = 2.0) -> float:
    """log E_{i ≠ j} exp(−t‖z_i − z_j‖²) of l2-normalised features (N, D): lower is more uniform, 0 is one point."""
    z = on_sphere(features.float())
    distance = torch.pdist(z).square() if z.device.type == "cpu" else _pairwise(z)
    return float((-t * distance).exp().mean().log())


def _pairwise(z: Tensor) -> Tensor:
    i, j = torch.triu_indices(len(z), len(z), offset=1, device=z.device)
    return (2 - 2 * (z @ z.T)).clamp_min(0)[i, j]
