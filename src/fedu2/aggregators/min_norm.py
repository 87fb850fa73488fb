"""The point of least norm in the convex hull of K vectors, from their Gram matrix.

    min_{p ∈ simplex} ‖Σ_k p_k g_k‖² = pᵀGp,    G = [⟨g_i, g_j⟩]

**Scaling.** With s_k = ‖g_k‖, cosines R = G/(s sᵀ), c = 1/s and p_k ∝ c_k y_k the optimality conditions become those of

    min_{y ≥ 0}  ½ yᵀRy − cᵀy,    that is    y ≥ 0,   Ry ≥ c,   yᵀ(Ry − c) = 0,

a problem without the simplex, whose matrix has a unit diagonal however different the lengths are. A ridge of
rounding size on R makes it strictly convex: it has one solution also when vectors are equal or dependent, equal
vectors share their weight about equally, and 0 in the hull, where y has no bound, is no special case.

**Solution.** Block principal pivoting: guess the active set, solve one linear system, exchange every index of wrong
sign, repeat. A handful of systems suffice as a rule; where it does not come to rest, the monotone active-set method
of Lawson and Hanson goes on from its last point. Both are bounded, and the outcome is measured against G itself.

Portugal, Júdice, Vicente: A comparison of block pivoting and interior-point algorithms for linear least squares
problems with nonnegative variables, 1994. Lawson, Hanson: Solving least squares problems, 1974, chapter 23.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["MinNorm", "change_rates", "kkt_residual", "min_norm_weights"]

# Signs are not told apart below this share of Σy; it bounds the residual of an accepted solution.
_TOLERANCE = 1e-12
# Reached at once for a Gram matrix computed in double precision; one in single precision takes proximal steps.
_GOAL, _PROXIMAL_STEPS = 1e-10, 30
_EPS = torch.finfo(torch.float64).eps


@dataclass(frozen=True, eq=False)
class MinNorm:
    """The optimal weights and their certificate."""

    weights: Tensor  # (K,) float64 on the CPU: p ≥ 0, Σp = 1
    value: float  # pᵀGp, the squared norm of the combination
    residual: float  # see `kkt_residual`
    solves: int  # linear systems solved


def min_norm_weights(gram: Tensor) -> MinNorm:
    """Solve min_{p ∈ simplex} pᵀGp for a Gram matrix (K, K) of any rank, exactly up to rounding.

    Zero vectors, if there are any, are the optimum and share the weight. G may be indefinite by rounding noise.
    """
    G = _symmetric(gram)
    lengths = G.diagonal().clamp_min(0).sqrt()
    if bool((lengths == 0).any()):
        zero = (lengths == 0).double()
        return _certified(G, zero / zero.sum(), solves=0)
    # Cauchy–Schwarz; rounding noise may violate it, and a cosine of 1.0000001 makes R indefinite.
    cosines = (G / lengths[:, None] / lengths).clamp(-1, 1)
    inverse_lengths = lengths.min() / lengths
    ridge = _ridge(cosines)
    y, solves, found = torch.zeros_like(lengths), 0, []
    for _ in range(_PROXIMAL_STEPS):
        # The first step solves the ridged problem; further ones, about the last y, take the ridge's bias out.
        y, more = _solve_nonnegative(cosines, ridge, inverse_lengths + ridge * y)
        solves += more
        weights = inverse_lengths * y
        found.append(_certified(G, weights / weights.sum(), solves))
        if found[-1].residual <= _GOAL:
            break
    return min(found, key=lambda candidate: candidate.residual)


def change_rates(gram: Tensor, weights: Tensor) -> Tensor:
    """⟨g_k, d⟩ for d = Σ_j p_j g_j, (K,). At the optimum equal over active clients, not smaller for the others."""
    return _symmetric(gram) @ weights.to("cpu", torch.float64)


def kkt_residual(gram: Tensor, weights: Tensor) -> float:
    """How far p is from optimal: max_k (pᵀGp − (Gp)_k)₊ / (‖g_k‖ · Σ_j p_j‖g_j‖).

    The denominator is the largest value that |⟨g_k, Σ_j p_j g_j⟩| could have, so the residual does not depend on the
    scale of the vectors, and a vector of great length is not asked for digits that rounding has taken. At the
    optimum x* = Σ p*_k g_k it is 0, and in general ‖x − x*‖² ≤ residual · Σ p_k‖g_k‖ · Σ p*_k‖g_k‖.
    """
    G = _symmetric(gram)
    lengths = G.diagonal().clamp_min(0).sqrt()
    p = weights.to("cpu", torch.float64)
    rates = G @ p
    violations = (p @ rates - rates).clamp_min(0)
    largest = lengths * (p @ lengths)
    shares = torch.where(violations > 0, violations / largest, 0.0)
    return float(shares.max())


def _certified(gram: Tensor, weights: Tensor, solves: int) -> MinNorm:
    value = float(weights @ gram @ weights)
    return MinNorm(weights, value, kkt_residual(gram, weights), solves)


def _symmetric(gram: Tensor) -> Tensor:
    if gram.ndim != 2 or gram.shape[0] != gram.shape[1] or gram.shape[0] == 0:
        raise ValueError(f"a Gram matrix is square and not empty, not of shape {tuple(gram.shape)}")
    G = gram.detach().to("cpu", torch.float64)
    if not bool(G.isfinite().all()):
        raise ValueError("the Gram matrix has entries that are not finite")
    return (G + G.T) / 2


def _solve_nonnegative(cosines: Tensor, ridge: float, c: Tensor) -> tuple[Tensor, int]:
    """The y ≥ 0 that minimises ½yᵀ(R + εI)y − cᵀy, and the number of linear systems it took."""
    M = cosines + ridge * torch.eye(len(c), dtype=c.dtype)
    solves = 0

    def solve(active: Tensor) -> Tensor:
        """Solve M_AA y_A = c_A on the active set A, with y = 0 elsewhere."""
        nonlocal solves
        solves += 1
        index = active.nonzero().squeeze(1)
        factor, _ = torch.linalg.cholesky_ex(M[index][:, index])
        y = torch.zeros_like(c)
        y[index] = torch.cholesky_solve(c[index, None], factor).squeeze(1)
        return y

    y, settled = _block_pivoting(M, c, solve)
    if not settled:
        y = _lawson_hanson(M, c, solve, y.clamp_min(0))
    return y.clamp_min(0), solves


def _ridge(cosines: Tensor) -> float:
    """An ε that makes R + εI positive definite with a margin, as small as rounding allows."""
    identity = torch.eye(len(cosines), dtype=cosines.dtype)
    ridge = 4 * len(cosines) * _EPS
    while int(torch.linalg.cholesky_ex(cosines + ridge * identity).info) != 0:
        ridge *= 4
    return 4 * ridge


def _block_pivoting(M: Tensor, c: Tensor, solve: Callable[[Tensor], Tensor]) -> tuple[Tensor, bool]:
    """Exchange all indices of wrong sign at a time; gives up when their number does not fall four times running."""
    active = torch.ones(len(c), dtype=torch.bool)
    fewest, patience = len(c) + 1, 4
    while True:
        y = solve(active)
        slack = M @ y - c
        margin = _TOLERANCE * y.abs().sum()
        wrong = torch.where(active, y < -margin, slack < -margin)
        count = int(wrong.sum())
        if count == 0:
            return y, True
        patience = 4 if count < fewest else patience - 1
        if patience == 0:
            return y, False
        fewest = min(fewest, count)
        active = active ^ wrong


def _lawson_hanson(M: Tensor, c: Tensor, solve: Callable[[Tensor], Tensor], y: Tensor) -> Tensor:
    """Let one index in at a time and go only as far as signs allow: the objective falls in every step."""
    active = y > 0
    for _ in range(20 * len(c) + 20):
        target = solve(active)
        blocked = active & (target <= 0)
        if bool(blocked.any()):
            room = torch.where(blocked, y / (y - target).clamp_min(torch.finfo(y.dtype).tiny), torch.inf)
            first = int(room.argmin())
            y = (y + room[first] * (target - y)).clamp_min(0)
            active[first] = False
            y[~active] = 0
            continue
        y = target
        slack = torch.where(active, torch.inf, M @ y - c)
        entering = int(slack.argmin())
        if float(slack[entering]) >= -_TOLERANCE * float(y.sum()):
            break
        active[entering] = True
    return y
