"""Transport solvers at the size of FUR: time, relative gap and the gradient on Z, beside POT and cvxpy.

Run `python -m benchmarks.transport`. Times are ratios to the default solver, all from one run on one thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import cvxpy
import numpy as np
import ot
import torch
from torch import Tensor
from torch.nn.functional import normalize

from fedu2.regularizers.transport import solve

KINDS = ("spread", "clustered", "low rank", "collapsed")
N, D, TAU = 128, 512, 0.8
Solver = Callable[[Tensor], Tensor]  # cost (2, N, N) → plan


@dataclass(frozen=True)
class Row:
    """One solver; accuracy is the worst over kinds of batches and views."""

    solver: str
    milliseconds: float
    relative_time: float
    gap: float
    cosine: float
    least_norm: float
    largest_norm: float


def batch(kind: str, seed: int) -> Tensor:
    """Two views of unit vectors (2, N, D)."""
    source = torch.Generator().manual_seed(seed)

    def directions(*shape: int) -> Tensor:
        return normalize(torch.randn(2, *shape, generator=source, dtype=torch.float64), dim=-1)

    noise, centres = directions(N, D), directions(10, D)
    return {
        "spread": noise,
        "clustered": normalize(centres[:, torch.arange(N) % 10] + 0.3 * noise, dim=-1),
        "low rank": normalize(directions(N, 8) @ directions(8, D), dim=-1),
        "collapsed": normalize(centres[:, :1] + 0.02 * noise, dim=-1),
    }[kind]


def ours(name: str) -> Solver:
    masses = torch.ones(N)
    return lambda cost: solve(cost.float(), masses, masses, TAU, TAU, solver=name).plan


def multiplicative(iterations: int) -> Solver:
    """POT's solver of the same problem; it takes one problem at a time."""
    masses = np.ones(N)

    def run(cost: Tensor) -> Tensor:
        plans = [
            ot.unbalanced.mm_unbalanced(masses, masses, c.numpy(), TAU, div="l2", numItermax=iterations) for c in cost
        ]
        return torch.as_tensor(np.stack(plans))

    return run


def conic(cost: Tensor) -> Tensor:
    """cvxpy with Clarabel on the dual; the multipliers are the plan."""
    plans = []
    for c in cost:
        f, g = cvxpy.Variable((N, 1)), cvxpy.Variable((1, N))
        feasible = f @ np.ones((1, N)) + np.ones((N, 1)) @ g <= c.numpy()
        value = cvxpy.sum(f) + cvxpy.sum(g) - (cvxpy.sum_squares(f) + cvxpy.sum_squares(g)) / (2 * TAU)
        cvxpy.Problem(cvxpy.Maximize(value), [feasible]).solve(solver="CLARABEL")
        plans.append(np.maximum(feasible.dual_value, 0))
    return torch.as_tensor(np.stack(plans))


SOLVERS: dict[str, tuple[Solver, int]] = {  # with repetitions for the clock
    "sinkhorn": (ours("sinkhorn"), 15),
    "fast": (ours("fast"), 15),
    "exact": (ours("exact"), 5),
    "POT mm_unbalanced, 100 steps": (multiplicative(100), 3),
    "POT mm_unbalanced, 1000 steps": (multiplicative(1000), 1),
    "cvxpy, Clarabel on the dual": (conic, 1),
}


def value(cost: Tensor, plan: Tensor) -> Tensor:
    off = (plan.sum(-1) - 1).square().sum(-1) + (plan.sum(-2) - 1).square().sum(-1)
    return (cost * plan).sum((-1, -2)) + TAU / 2 * off


def tangent_gradient(z: Tensor, references: Tensor, plan: Tensor) -> Tensor:
    """What reaches the network: ⟨π, ∂C⟩ through the normalisation of z."""
    pull = -plan @ references
    return pull - (pull * z).sum(-1, keepdim=True) * z


def seconds(solver: Solver, cost: Tensor, repetitions: int) -> float:
    times = []
    for _ in range(repetitions):
        start = time.perf_counter()
        solver(cost)
        times.append(time.perf_counter() - start)
    return median(times)


def measure(name: str, unit: float) -> Row:
    solver, repetitions = SOLVERS[name]
    gaps, cosines, norms, times = [], [], [], []
    for seed, kind in enumerate(KINDS):
        z, references = batch(kind, seed), batch("spread", seed + 100)
        cost = 1 - z @ references.mT
        best = solve(cost, torch.ones(N), torch.ones(N), TAU, TAU, solver="exact")
        plan = solver(cost).double()
        gradient, exact = (tangent_gradient(z, references, p).flatten(1) for p in (plan, best.plan))
        gaps += ((value(cost, plan) - best.dual) / best.dual).tolist()
        cosines += torch.cosine_similarity(gradient, exact, dim=-1).tolist()
        norms += (gradient.norm(dim=-1) / exact.norm(dim=-1)).tolist()
        times.append(seconds(solver, cost, repetitions))
    spent = median(times)
    return Row(name, 1e3 * spent, spent / (unit or spent), max(gaps), min(cosines), min(norms), max(norms))


def main() -> list[Row]:
    """Measure every solver on two views of 128 × 128 in 512 dimensions, print the table and return it."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        rows = [measure("sinkhorn", unit=0.0)]
        unit = rows[0].milliseconds / 1e3
        rows += [measure(name, unit) for name in SOLVERS if name != "sinkhorn"]
    finally:
        torch.set_num_threads(threads)
    print(f"{'solver':32}{'ms':>8}{'time':>8}{'gap':>10}{'cosine':>9}{'norm':>14}")
    for row in rows:
        norm = f"{row.least_norm:.3f}–{row.largest_norm:.3f}"
        print(
            f"{row.solver:32}{row.milliseconds:8.1f}{row.relative_time:8.1f}{row.gap:10.1e}{row.cosine:9.3f}{norm:>14}"
        )
    return rows


if __name__ == "__main__":
    main()
