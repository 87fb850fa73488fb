"""How alike two models represent the same images.

Reference: Kornblith et al., Similarity of Neural Network Representations Revisited, ICML 2019.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["cka_matrix", "linear_cka"]


def linear_cka(x: Tensor, y: Tensor) -> float:
    """‖XᵀY‖²_F / (‖XᵀX‖_F ‖YᵀY‖_F) of centred features X (N, D₁) and Y (N, D₂) of the same N images, in [0, 1].

    1: alike but for a rotation, a scale and a shift; 0: unrelated, or one of them is the same for all images.
    """
    return float(cka_matrix([x, y])[0, 1])


def cka_matrix(features: Sequence[Tensor]) -> Tensor:
    """`linear_cka` between all pairs of M representations, (N, D_m) each: (M, M), float64, on the CPU."""
    centred = [x.double() - x.double().mean(dim=0) for x in features]
    norms = [float((x.T @ x).norm()) for x in centred]
    matrix = torch.zeros(len(features), len(features), dtype=torch.float64)
    for i, x in enumerate(centred):
        for j, y in enumerate(centred[: i + 1]):
            scale = norms[i] * norms[j]
            matrix[i, j] = matrix[j, i] = float((x.T @ y).square().sum()) / scale if scale > 0 else 0.0
    return matrix
