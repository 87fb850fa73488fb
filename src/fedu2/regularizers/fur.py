"""FUR, the flexible uniform regulariser: unbalanced transport of a batch toward random points on the sphere.

ℓ_u(Z) is the optimal value of

    min_{π ≥ 0}  ⟨C, π⟩ + τ_a/2 ‖π1 − a‖² + τ_b/2 ‖πᵀ1 − b‖²

between the normalised batch Z (N points) and a fresh sample S of M points, uniform on the sphere. Its gradient is the
envelope one, ⟨π*, ∂C⟩ with π* held fixed. Points that are far from every reference stay unmatched: that is the
flexibility. Mass moves only where C_ij < τ_a a_i + τ_b b_j, and that decides between two forms:

    cosine    C = ½‖z − s‖² = 1 − ⟨z, s⟩, a_i = b_j = 1, value / N. In high dimension C ≈ 1 < τ_a + τ_b = 1.6: about 0.4
              of the mass moves. Masses stay 1 for M ≠ N; N/M would push the threshold below the cost.
    literal   C = ‖z − s‖² ≈ 2, a_i = 1/N, b_j = 1/M, as printed. The threshold is 0.0125 at N = M = 128: nothing moves
              and the gradient is zero.

Reference: Liao et al., Rethinking the Representation in Federated Unsupervised Learning with Non-IID Data, CVPR 2024.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import normalize

from fedu2.errors import UsageError
from fedu2.options import FUROptions
from fedu2.regularizers import transport

__all__ = ["FURResult", "fur", "fur_toward", "sphere_points"]


@dataclass(frozen=True)
class FURResult:
    """One value a view: shape () for z of shape (N, d), (V,) for (V, N, d)."""

    loss: Tensor  # ℓ_u, differentiable; λ_U is left to the caller
    mass: Tensor  # matched mass as a share, in [0, 1], of what would move if the cost were zero (N for N = M)
    gap: Tensor  # relative primal-dual gap of the transport plan


@dataclass(frozen=True)
class Scaling:
    """How a form scales its problem: C = cost · (1 − ⟨z, s⟩), mass a of every point and b of every reference."""

    cost: float
    a: float
    b: float
    divisor: float  # of the value


FORMS: dict[str, Callable[[int, int], Scaling]] = {
    "cosine": lambda n, m: Scaling(cost=1.0, a=1.0, b=1.0, divisor=float(n)),
    "literal": lambda n, m: Scaling(cost=2.0, a=1.0 / n, b=1.0 / m, divisor=1.0),
}


def fur(z: Tensor, generator: torch.Generator, options: FUROptions) -> FURResult:
    """ℓ_u of z (N, d), or of V views (V, N, d) in one batched solve, toward fresh references for each view."""
    check(z)
    m = options.references or z.shape[-2]
    return fur_toward(z, sphere_points((*z.shape[:-2], m, z.shape[-1]), generator), options)


def sphere_points(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Uniform points on the unit sphere, on the generator's device; the last axis is the space."""
    return normalize(torch.randn(shape, generator=generator, device=generator.device), dim=-1)


def fur_toward(z: Tensor, references: Tensor, options: FUROptions) -> FURResult:
    """ℓ_u of z (..., N, d) toward given unit vectors (..., M, d): deterministic, fit for graph capture."""
    check(z)
    n, m = z.shape[-2], references.shape[-2]
    form = FORMS[options.form](n, m)
    with torch.autocast(z.device.type, enabled=False):
        # A vector of length zero has no direction; eps bounds its gradient.
        points = normalize(z.to(torch.promote_types(z.dtype, torch.float32)), dim=-1, eps=1e-6)
        references = references.to(points.dtype)
        plan = transport.solve(
            form.cost * cosine_distance(points.detach(), references),
            points.new_full((n,), form.a),
            points.new_full((m,), form.b),
            options.tau_a,
            options.tau_b,
            solver=options.solver,
        )
        # ⟨π, C⟩ = cost · (Σ π − ⟨Z, πS⟩): only the second term depends on Z.
        pull = form.cost * (plan.plan.to(points.dtype) @ references)
        envelope = -(points * pull).sum((-2, -1))
        value = plan.primal.to(points.dtype) + (envelope - envelope.detach())
    tau_a, tau_b = options.tau_a, options.tau_b
    free_mass = (tau_a * form.a + tau_b * form.b) / (tau_a / n + tau_b / m)
    return FURResult(
        value / form.divisor, (plan.mass.to(points.dtype) / free_mass).clamp(max=1), plan.gap.to(points.dtype)
    )


def cosine_distance(points: Tensor, references: Tensor) -> Tensor:
    """1 − ⟨z_i, s_j⟩ (..., N, M), sharp also when all points are close together.

    The mean is treated apart: a product in TF32 would otherwise round away the differences between the points.
    """
    mean = points.mean(-2, keepdim=True)
    common = (mean * references).sum(-1).unsqueeze(-2)
    return 1 - common - (points - mean) @ references.mT


def check(z: Tensor) -> None:
    if z.ndim < 2 or z.numel() == 0:
        raise UsageError(f"FUR needs a batch of shape (N, d) or (V, N, d), not {tuple(z.shape)}")
