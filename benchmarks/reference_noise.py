"""How much of FUR's gradient is signal: python -m benchmarks.reference_noise [--out results/bench/fur-noise.json]

References are drawn afresh in every step. What two independent draws agree on is signal, the rest averages out: for
gradients g, g' of independent draws the share is E⟨g, g'⟩ / E‖g‖². Beside it the cosine of the mean gradient to that
of the uniformity loss log E exp(−2‖z_i − z_j‖²) (Wang and Isola 2020), and the length of gradient and signal a point.

`--forms --points 64 --dimensions 64` asks the same of temperatures and marginals, in the dimensions of a small encoder.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import normalize

from fedu2.options import FUROptions
from fedu2.regularizers import fur

DRAWS = 60
SUBSPACE = 32

Regularizer = Callable[[Tensor, torch.Generator], Tensor]


def batches(points: int, dimensions: int) -> dict[str, Tensor]:
    """Unit vectors (points, dimensions) with a common part, of low rank, and spread out."""
    source = torch.Generator().manual_seed(0)

    def noise(*shape: int) -> Tensor:
        return normalize(torch.randn(*shape, generator=source), dim=-1)

    def common(cosine: float) -> Tensor:
        return normalize(cosine**0.5 * noise(1, dimensions) + (1 - cosine) ** 0.5 * noise(points, dimensions), dim=-1)

    def low(rank: int) -> Tensor:
        return normalize(noise(points, rank) @ noise(rank, dimensions), dim=-1)

    found = {f"mean cosine {cosine}": common(cosine) for cosine in (0.5, 0.1)}
    return found | {f"rank {rank}": low(rank) for rank in (16, 64)} | {"uniform": noise(points, dimensions)}


def form(**options: object) -> Regularizer:
    chosen = FUROptions.model_validate(options)
    return lambda z, source: fur(z, source, chosen).loss


def forms() -> dict[str, Regularizer]:
    """FUR with other temperatures and marginals than its own."""
    found = {"defaults": form()} | {f"t = {t}": form(temperature=t) for t in (1.0, 2.0)}
    return found | {"τ_b = 0.05": form(tau_b=0.05), "τ_a = τ_b = 100": form(tau_a=100, tau_b=100)}


def gradients() -> dict[str, Regularizer]:
    """FUR's gradients under their names."""

    def in_subspace(z: Tensor, source: torch.Generator) -> Tensor:
        """In a fresh random subspace, where references are less orthogonal to everything: an idea that failed."""
        return fur(z @ torch.randn(z.shape[-1], SUBSPACE, generator=source), source, FUROptions(gradient="plan")).loss

    found = {
        "plan": form(gradient="plan"),
        "plan, M = 1024": form(gradient="plan", references=1024),
        f"plan in {SUBSPACE} dimensions": in_subspace,
    }
    for temperature in (0.25, 0.5, 1.0):
        found[f"expected, t = {temperature}"] = form(gradient="expected", temperature=temperature)
    return found | {"uniformity loss": lambda z, source: uniformity(z)}


def gradient(regularizer: Callable[[Tensor], Tensor], z: Tensor) -> Tensor:
    z = z.clone().requires_grad_()
    (found,) = torch.autograd.grad(regularizer(z), z)
    return found


def uniformity(z: Tensor) -> Tensor:
    return torch.pdist(normalize(z, dim=-1)).square().mul(-2).exp().mean().log()


def measure(regularizer: Regularizer, z: Tensor) -> dict[str, float]:
    source = torch.Generator().manual_seed(1)
    draws = torch.stack([gradient(lambda z: regularizer(z, source), z) for _ in range(DRAWS)])
    half = DRAWS // 2
    signal = float((draws[:half].mean(0) * draws[half:].mean(0)).sum())
    whole = float(draws.square().sum((1, 2)).mean())
    mean, wanted = draws.mean(0), gradient(uniformity, z)
    cosine = float((mean * wanted).sum() / (mean.norm() * wanted.norm()))
    a_point = len(z) ** 0.5  # the loss is a mean over points, the norm a root of a sum
    return {
        "share": signal / whole, "cosine to uniformity": cosine,
        "length": whole**0.5 * a_point, "signal": max(signal, 0) ** 0.5 * a_point,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--forms", action="store_true", help="temperatures and marginals in place of gradients")
    parser.add_argument("--points", type=int, default=128)
    parser.add_argument("--dimensions", type=int, default=512)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    print(f"{'batch':<18}{'gradient':<26}{'share':>9}{'cosine':>8}{'length':>9}{'signal':>9}")
    for batch, z in batches(arguments.points, arguments.dimensions).items():
        for name, regularizer in (forms() if arguments.forms else gradients()).items():
            found = measure(regularizer, z)
            share, cosine, length, signal = found.values()
            print(f"{batch:<18}{name:<26}{share:9.4f}{cosine:8.2f}{length:9.3f}{signal:9.4f}", flush=True)
            rows.append({"batch": batch, "gradient": name, **found})
    if arguments.out:
        arguments.out.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
