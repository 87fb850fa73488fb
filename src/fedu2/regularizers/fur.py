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

Over the references that gradient is nearly all noise, so by default it is replaced by its mean (`away_from_rivals`).
Then ℓ_u is counted in units of the cost's deviation over random references, 1/√d, in which that mean is the same in
every dimension: one λ_U fits all encoders. `gradient=plan` is the direct one, in units of the cost as printed.

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
        match = matching(points.detach(), references.to(points.dtype), form, options)
        envelope = -(points * PULLS[options.gradient](match)).sum((-2, -1))
        value = match.plan.primal.to(points.dtype) + (envelope - envelope.detach())
        value = value / form.divisor * UNITS[options.gradient](z.shape[-1])
    tau_a, tau_b = options.tau_a, options.tau_b
    free_mass = (tau_a * form.a + tau_b * form.b) / (tau_a / n + tau_b / m)
    mass, gap = match.plan.mass.to(points.dtype), match.plan.gap.to(points.dtype)
    return FURResult(value, (mass / free_mass).clamp(max=1), gap)


@dataclass(frozen=True)
class Match:
    """A solved problem: unit vectors (..., N, d) and (..., M, d), the plan between them, and its temperature."""

    points: Tensor
    references: Tensor
    form: Scaling
    plan: transport.Plan
    temperature: Tensor  # ε in units of the cost, (..., 1, 1)
    tau_b: float


def matching(points: Tensor, references: Tensor, form: Scaling, options: FUROptions) -> Match:
    """The transport plan: as sharp as the solver makes it, or for `gradient=expected` smoothed."""
    cost = form.cost * cosine_distance(points, references)
    a, b = points.new_full(cost.shape[-2:-1], form.a), points.new_full(cost.shape[-1:], form.b)
    solver = transport.warm(options.temperature) if options.gradient == "expected" else options.solver
    plan = transport.solve(cost, a, b, options.tau_a, options.tau_b, solver=solver)
    # Where all points coincide the cost has no deviation: there is no direction to find, and nothing to divide by.
    temperature = (options.temperature * transport.deviation(cost)).clamp(min=1e-6)
    return Match(points, references, form, plan, temperature, options.tau_b)


def toward_references(match: Match) -> Tensor:
    """πS (..., N, d), the envelope gradient: ⟨π, C⟩ = cost · (Σ π − ⟨Z, πS⟩), and only the second part depends on Z."""
    return match.form.cost * (match.plan.plan.to(match.points.dtype) @ match.references)


def away_from_rivals(match: Match) -> Tensor:
    """E[πS] over the references (..., N, d), up to a multiple of z_i, which a unit vector does not feel.

    Stein's identity on the sphere, E[φ(s) s] ≈ E[∇φ(s)]/d, for the smoothed plan π_i(s) = exp((f_i + g(s) − C_i(s))/ε).
    With the mass r(s) = Σ_l π_l(s) = b − g(s)/τ_b of a reference,

        E[π_i s] = cost/(dε) (E[π_i] z_i − Σ_l K_il z_l),     K_il = E[π_i π_l / (r + ε/τ_b)]:

    points that compete for the same references repel each other. The mean over the references at hand now estimates K,
    not a direction: of πS itself, a matched reference in d dimensions, all but a percent is noise.
    """
    points, eps = match.points, match.temperature
    plan = match.plan.plan.to(points.dtype)
    rivalry = (plan / (plan.sum(-2, keepdim=True) + eps / match.tau_b)) @ plan.mT
    return -(match.form.cost**2) / (points.shape[-1] * eps) * (rivalry @ points)


PULLS: dict[str, Callable[[Match], Tensor]] = {"plan": toward_references, "expected": away_from_rivals}
UNITS: dict[str, Callable[[int], float]] = {"plan": lambda d: 1.0, "expected": lambda d: d**0.5}


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
