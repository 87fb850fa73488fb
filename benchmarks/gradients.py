"""How accurate FUR's solvers are where it counts, in the gradient on Z: the tables in `fedu2.regularizers.transport`.

    python -m benchmarks.gradients

For each kind of batch, 25 problems of 128 × 128 (d = 256 and 512 in turn) with fresh references, against `exact`. The
seeds are not those by which the solvers' settings were chosen. Worst cosine, range of the norm, largest gap.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import normalize

from fedu2.regularizers.transport import solve

N, SEEDS = 128, range(500, 525)
SOLVERS = ("sinkhorn", "fast")
TIGHT = ((2, 0.05), (2, 0.02), (2, 0.01), (4, 0.02), (8, 0.02))  # points, spread of the cloud around each


def batches(d: int, generator: torch.Generator) -> dict[str, Tensor]:
    """What an encoder may produce, from well spread to nearly collapsed, and with two scales at once."""

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    def clouds(points: Tensor, spread: float) -> Tensor:
        return points[torch.arange(N) % len(points)] + spread * noise(N, d) / d**0.5

    point = normalize(noise(1, d), dim=1)
    found = {
        "spread": noise(N, d),
        "clustered": clouds(normalize(noise(8, d), dim=1), 0.3),
        "rank 8": noise(N, 8) @ noise(8, d),
        "collapsed": clouds(point, 0.02),
    }
    for count, spread in TIGHT:
        found[f"{count} tight, {spread}"] = clouds(normalize(noise(count, d), dim=1), spread)
    found["outlier"] = torch.cat([clouds(point, 0.02)[1:], noise(1, d)])
    found["opposite"] = clouds(torch.cat([point, -point]), 0.02)
    return found


def gradient(z: Tensor, references: Tensor, solver: str, tau: float) -> tuple[Tensor, float]:
    """∂⟨π*, C⟩/∂z through the normalisation, and the plan's gap."""
    z = z.clone().requires_grad_()
    points = normalize(z, dim=1)
    plan = solve(1 - points.detach() @ references.T, torch.ones(N), torch.ones(N), tau, tau, solver=solver)
    (-(points * (plan.plan.float() @ references)).sum()).backward()
    assert z.grad is not None
    return z.grad.double().flatten(), float(plan.gap)


def main(tau: float = 0.8) -> None:
    torch.set_num_threads(1)
    rows: dict[tuple[str, str], list[tuple[float, float, float]]] = {}
    for seed in SEEDS:
        generator, d = torch.Generator().manual_seed(seed), 256 if seed % 2 else 512
        for kind, z in batches(d, generator).items():
            references = normalize(torch.randn(N, d, generator=generator), dim=1)
            exact, _ = gradient(z, references, "exact", tau)
            for solver in SOLVERS:
                ours, gap = gradient(z, references, solver, tau)
                cosine = float(ours @ exact / (ours.norm() * exact.norm()))
                rows.setdefault((kind, solver), []).append((cosine, float(ours.norm() / exact.norm()), gap))
    print(f"{'batches':<16}{'solver':<10}{'cosine':>8}{'norm':>14}{'gap':>10}")
    for (kind, solver), found in rows.items():
        cosines, norms, gaps = zip(*found, strict=True)
        print(f"{kind:<16}{solver:<10}{min(cosines):8.3f}{f'{min(norms):.2f}–{max(norms):.2f}':>14}{max(gaps):10.1e}")


if __name__ == "__main__":
    main()
