"""The kernels of batch norm at the sizes of ResNet-18 with 256 images: time and rate, beside torch's layers.

    python -m benchmarks.norm [--set STATISTICS.warps=8 COLUMNS=128] [--sweep APPLY]

Times are medians over replays of a CUDA graph in which many tensors take turns, so that none is in the cache. The rate
counts the bytes that the kernels must move (see `fedu2.models.norm_kernel`), for torch's layers the same ones: it says
how much faster they would have to be. Two groups for the kernels, one for torch's layers. --sweep tries settings of one
kernel and names the fastest for a step of BYOL: two forward passes of all norms, and one backward.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType

import torch
import torch.nn.functional as F
from benchmarks.timing import graph_seconds
from torch import Tensor, nn

from fedu2.models.norm import Norm, second

POOL = 256 * 2**20  # bytes of input that take turns: five times an H200's cache


@dataclass(frozen=True)
class Case:
    """One kind of norm in ResNet-18, and how many there are."""

    shape: tuple[int, ...]
    residual: bool  # with a residual and a second reader of the output; otherwise norm and ReLU alone
    count: int

    def moved(self, short: bool) -> tuple[int, int]:
        """Bytes in bfloat16: forward, backward."""
        forward, backward = (4, 8) if self.residual else (3, 5)
        if short:  # one kernel reads everything once
            forward, backward = forward - 1, backward - 2
        size = 2 * torch.Size(self.shape).numel()
        return forward * size, backward * size


STAGES = ((256, 64, 32, 32), (256, 128, 16, 16), (256, 256, 8, 8), (256, 512, 4, 4))
CASES = [
    *(Case(shape, residual, 2 if residual else 3) for shape in STAGES for residual in (False, True)),
    Case((256, 2048), False, 2),
]

Layer = Callable[[Tensor, Tensor | None], list[Tensor]]  # (x, residual) → the output, once for each reader


@dataclass(frozen=True)
class Times:
    """Seconds of one norm."""

    forward: float
    backward: float


def ours(channels: int) -> tuple[nn.Module, Layer]:
    norm = Norm(channels).cuda()
    norm.groups, norm.fused = 2, True

    def run(x: Tensor, residual: Tensor | None) -> list[Tensor]:
        y = norm(x, residual, relu=True)
        return [y, second(y)]

    return norm, run


def theirs(channels: int, axes: int) -> tuple[nn.Module, Layer]:
    norm = (nn.BatchNorm2d if axes == 4 else nn.BatchNorm1d)(channels).cuda()

    def run(x: Tensor, residual: Tensor | None) -> list[Tensor]:
        y = norm(x) if residual is None else norm(x) + residual
        y = F.relu(y, inplace=True)
        return [y, y]

    return norm, run


def measure(case: Case, norm: nn.Module, layer: Layer) -> Times:
    """Forward alone, and what a backward pass adds to it."""
    turns = max(1, POOL // (2 * torch.Size(case.shape).numel()))
    inputs = [noise(case.shape).requires_grad_() for _ in range(turns)]
    residuals = [noise(case.shape).requires_grad_() if case.residual else None for _ in range(turns)]
    readers = 2 if case.residual else 1
    directions = [[noise(case.shape) for _ in range(readers)] for _ in range(turns)]

    def forward() -> list[list[Tensor]]:
        return [layer(x, residual)[:readers] for x, residual in zip(inputs, residuals, strict=True)]

    def both() -> None:
        for outputs, x, residual, direction in zip(forward(), inputs, residuals, directions, strict=True):
            sources = [x, *norm.parameters(), *([] if residual is None else [residual])]
            torch.autograd.grad(outputs, sources, direction)

    alone, together = graph_seconds(forward) / turns, graph_seconds(both) / turns
    return Times(alone, together - alone)


def noise(shape: Sequence[int]) -> Tensor:
    x = torch.randn(*shape, device="cuda", dtype=torch.bfloat16)
    return x.contiguous(memory_format=torch.channels_last) if x.ndim == 4 else x


def step_seconds(times: Sequence[Times]) -> float:
    """All norms of a step of BYOL: the target network goes forward, too."""
    return sum(case.count * (2 * t.forward + t.backward) for case, t in zip(CASES, times, strict=True))


def table(kernels: ModuleType) -> None:
    """Every case, ours beside torch's."""
    print(f"{'':36}{'kernels':^32}{'torch, eager':^32}")
    print(f"{'shape':22}{'':14}" + 2 * f"{'forward':>9}{'TB/s':>7}{'backward':>9}{'TB/s':>7}")
    results: list[list[Times]] = [[], []]
    for case in CASES:
        rows = torch.Size(case.shape).numel() // case.shape[1] // 2
        moved = case.moved(short=rows <= kernels.SHORT)
        line = f"{'×'.join(map(str, case.shape)):22}{'residual, relu' if case.residual else 'relu':14}"
        for found, (norm, layer) in zip(
            results, (ours(case.shape[1]), theirs(case.shape[1], len(case.shape))), strict=True
        ):
            found.append(measure(case, norm, layer))
            for seconds, size in zip((found[-1].forward, found[-1].backward), moved, strict=True):
                line += f"{1e6 * seconds:7.1f}µs{size / seconds / 1e12:7.2f}"
        print(line, flush=True)
    print(
        f"BYOL step, all norms: {1e3 * step_seconds(results[0]):.3f} ms; torch {1e3 * step_seconds(results[1]):.3f} ms"
    )


def sweep(kernels: ModuleType, name: str) -> None:
    """Settings of one kernel, each with the time of a step."""
    found = []
    for programs, elements, warps, stages in itertools.product(
        (132, 264, 528), (4096, 8192, 16384), (4, 8, 16), (1, 3)
    ):
        if not 8 <= elements / (32 * warps) <= 64:
            continue
        launch = kernels.Launch(programs, elements, warps, stages)
        setattr(kernels, name, launch)
        times = [measure(case, *ours(case.shape[1])) for case in CASES]
        found.append((step_seconds(times), launch))
        print(f"{1e3 * found[-1][0]:.4f} ms  {launch}", flush=True)
    print(f"\nfastest: {name} = {min(found)[1]}")


def adjust(kernels: ModuleType, setting: str) -> None:
    """NAME=value, or NAME.field=value for a launch."""
    (name, _, field), value = setting.partition("=")[0].partition("."), int(setting.partition("=")[2])
    setattr(kernels, name, getattr(kernels, name)._replace(**{field: value}) if field else value)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME.field=value")
    parser.add_argument("--sweep", choices=("STATISTICS", "APPLY", "SUMS", "GRADIENT"))
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("norm: needs CUDA and Triton")
        return
    from fedu2.models import norm_kernel as kernels

    for setting in arguments.set:
        adjust(kernels, setting)
    if arguments.sweep:
        sweep(kernels, arguments.sweep)
    else:
        table(kernels)


if __name__ == "__main__":
    main()
