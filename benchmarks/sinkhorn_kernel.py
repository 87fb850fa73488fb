"""The fused Sinkhorn kernel beside the portable solver on a GPU: time of a step's two problems, and the gradient on Z.

    python -m benchmarks.sinkhorn_kernel

Times are medians over replays of a CUDA graph of many calls. Gradients as in `benchmarks.gradients`: the worst
cosine to `exact`, and the largest gap, over its kinds of batches for five seeds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from functools import partial

import torch
from benchmarks.gradients import batches
from benchmarks.timing import graph_seconds
from torch import Tensor
from torch.nn.functional import normalize

from fedu2.kernels import fused, why_not
from fedu2.regularizers.transport import Plan, solve, solvers

N, D, TAU = 128, 256, 0.8
SEEDS = range(500, 505)
CALLS = 20  # in a graph
Solve = Callable[[Tensor], Plan]  # of a cost (..., N, N)


def portable(name: str) -> Solve:
    def run(cost: Tensor) -> Plan:
        ones = cost.new_ones(N)
        with fused(False):
            return solve(cost, ones, ones, TAU, TAU, solver=name)

    return run


def kernel(name: str, warps: int) -> Solve:
    from fedu2.regularizers.sinkhorn_kernel import launch

    schedule = solvers[name].schedule
    assert schedule is not None

    def run(cost: Tensor) -> Plan:
        ones = cost.new_ones(N)
        plan, f, g, values = launch(cost, ones, ones, TAU, TAU, **asdict(schedule), warps=warps)
        return Plan(plan, f, g, *values.unbind())

    return run


def costs(device: torch.device) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Points, references and their cosine distances for every kind and seed."""
    found = []
    for seed in SEEDS:
        generator = torch.Generator().manual_seed(seed)
        for z in batches(D, generator).values():
            points = normalize(z, dim=1)
            references = normalize(torch.randn(N, D, generator=generator), dim=1)
            found.append(tuple(x.to(device) for x in (points, references, 1 - points @ references.T)))
    return found


def tangent_gradient(points: Tensor, references: Tensor, plan: Tensor) -> Tensor:
    """⟨π, ∂C⟩ through the normalisation of z."""
    pull = -plan.double() @ references.double()
    return (pull - (pull * points).sum(-1, keepdim=True) * points).flatten()


def accuracy(run: Solve, problems: list[tuple[Tensor, Tensor, Tensor]], exact: list[Tensor]) -> tuple[float, float]:
    cosines, gaps = [], []
    for (points, references, cost), best in zip(problems, exact, strict=True):
        result = run(cost)
        gradient = tangent_gradient(points, references, result.plan)
        cosines.append(float(torch.cosine_similarity(gradient, best, dim=0)))
        gaps.append(float(result.gap))
    return min(cosines), max(gaps)


def main() -> None:
    device = torch.device("cuda")
    if reason := why_not(device):
        print(f"No kernel to measure: {reason}.")
        return
    problems = costs(device)
    exact = [tangent_gradient(z, s, portable("exact")(cost).plan) for z, s, cost in problems]
    two = torch.stack([cost for _, _, cost in problems[:2]])
    print(f"{torch.cuda.get_device_name(device)}: two problems of {N} × {N}")
    print(f"{'solver':<12}{'iterations':>10}{'':4}{'way':<20}{'μs':>10}{'cosine':>10}{'gap':>10}")
    for name in ("fast", "sinkhorn"):
        schedule = solvers[name].schedule
        assert schedule is not None
        ways = {"portable": portable(name)} | {f"kernel, {w} warps": kernel(name, w) for w in (4, 8, 16)}
        for way, run in ways.items():
            cosine, gap = accuracy(run, problems, exact)
            spent = 1e6 * graph_seconds(partial(run, two), CALLS)
            print(f"{name:<12}{schedule.iterations:10}{'':4}{way:<20}{spent:10.1f}{cosine:10.4f}{gap:10.1e}")


if __name__ == "__main__":
    main()
