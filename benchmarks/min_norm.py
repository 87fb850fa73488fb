"""The min-norm solver beside general ones: time, objective and KKT residual on the same Gram matrices, in one run.

    python -m benchmarks.min_norm

Instances are EUA's vectors g_k = 2Δ_k/‖Δ_k‖² of K updates that differ in length by up to a factor of 30:
*orthogonal* ones, where nearly every client is active; *correlated* ones (cosines about 0.3) and ones of *low rank* (40
dimensions), where few are. Times are medians in one thread; `ratio` is a solver's time over ours.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import cvxpy as cp
import numpy as np
import torch
from scipy.optimize import nnls
from torch import Tensor

from fedu2.aggregators.min_norm import kkt_residual, min_norm_weights

SIZES = (10, 100, 300)
KINDS = {"orthogonal": (5000, 0.0), "correlated": (2000, 0.65), "low rank": (40, 0.65)}  # dimensions, common part


def instance(K: int, rank: int, common: float, seed: int = 0) -> Tensor:
    """The Gram matrix of g_k = 2Δ_k/‖Δ_k‖², scaled to a mean diagonal of 1 (general solvers want that)."""
    generator = torch.Generator().manual_seed(seed)
    deltas = torch.randn(K, rank, generator=generator, dtype=torch.float64)
    deltas += common * torch.randn(1, rank, generator=generator, dtype=torch.float64)
    deltas *= 30 ** torch.rand(K, 1, generator=generator, dtype=torch.float64)
    vectors = 2 * deltas / deltas.square().sum(1, keepdim=True)
    gram = vectors @ vectors.T
    return gram / gram.diagonal().mean()


def by_min_norm(gram: Tensor) -> Tensor:
    return min_norm_weights(gram).weights


def by_clarabel(gram: Tensor) -> Tensor:
    p = cp.Variable(len(gram), nonneg=True)
    problem = cp.Problem(cp.Minimize(cp.quad_form(p, cp.psd_wrap(gram.numpy()))), [cp.sum(p) == 1])
    problem.solve(solver=cp.CLARABEL)
    return on_simplex(p.value)


def by_nnls(gram: Tensor) -> Tensor:
    """Lawson–Hanson on ‖Vᵀx‖² + (1ᵀx − 1)², VVᵀ = G, whose solution is p up to a factor."""
    values, vectors = np.linalg.eigh(gram.numpy())
    root = (vectors * np.sqrt(values.clip(0))).T
    solution, _ = nnls(np.vstack([root, np.ones(len(gram))]), np.append(np.zeros(len(root)), 1.0))
    return on_simplex(solution)


def on_simplex(p: np.ndarray) -> Tensor:
    weights = torch.from_numpy(np.asarray(p, dtype=np.float64)).clamp_min(0)
    return weights / weights.sum()


SOLVERS: dict[str, Callable[[Tensor], Tensor]] = {
    "fedu2": by_min_norm,
    "cvxpy (Clarabel)": by_clarabel,
    "scipy nnls": by_nnls,
}


def median_seconds(solve: Callable[[Tensor], Tensor], gram: Tensor, repeats: int = 5) -> float:
    solve(gram)
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        solve(gram)
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def main() -> None:
    torch.set_num_threads(1)
    print(
        f"{'instance':10} {'K':>4} {'active':>6}  {'solver':17} {'ms':>9} {'ratio':>7} {'pᵀGp/ours − 1':>14} {'KKT':>8}"
    )
    for name, (rank, common) in KINDS.items():
        for K in SIZES:
            gram = instance(K, rank, common)
            ours = min_norm_weights(gram)
            active = int((ours.weights > 0).sum())
            base = median_seconds(by_min_norm, gram)
            for solver, solve in SOLVERS.items():
                p = solve(gram)
                seconds = base if solver == "fedu2" else median_seconds(solve, gram, 5 if K < 300 else 1)
                excess = float(p @ gram @ p) / ours.value - 1
                print(
                    f"{name:10} {K:4} {active:6}  {solver:17} {1e3 * seconds:9.2f} {seconds / base:7.1f}"
                    f" {excess:14.1e} {kkt_residual(gram, p):8.1e}"
                )


if __name__ == "__main__":
    main()
