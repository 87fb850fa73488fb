"""The first convolution of ResNet-18 with 256 images: forward and weight gradient, beside cuDNN.

    python -m benchmarks.stem [--sweep]

Times are medians over replays of a CUDA graph in which several sets of tensors take turns, so that none is in the
cache; cuDNN's contain what it does to three channels first. The rate counts the bytes of images and output. --sweep
tries settings of both kernels and names the fastest.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable
from types import ModuleType

import torch
import torch.nn.functional as F
from benchmarks.norm import noise
from benchmarks.timing import graph_seconds
from torch import Tensor

IMAGES, SIZE, OUTPUTS = 256, 32, 64
SETS = 8  # of tensors: together five times an H200's cache
MOVED = 2 * IMAGES * SIZE**2 * (3 + OUTPUTS)  # bytes
CHIP = 220 * 1024  # bytes of a multiprocessor's memory that one program may use

Forward = Callable[[Tensor, Tensor], Tensor]  # x, weight → y
Gradient = Callable[[Tensor, Tensor, Tensor], Tensor]  # x, dy, weight → dweight


def cudnn_forward(x: Tensor, weight: Tensor) -> Tensor:
    return F.conv2d(x, weight, padding=1)


def cudnn_gradient(x: Tensor, dy: Tensor, weight: Tensor) -> Tensor:
    _, dweight, _ = torch.ops.aten.convolution_backward(
        dy, x, weight, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [False, True, False]
    )
    return dweight  # type: ignore[no-any-return]


class Sets:
    """The tensors that take turns."""

    def __init__(self) -> None:
        self.weight = noise((OUTPUTS, 3, 3, 3))
        self.x = [noise((IMAGES, 3, SIZE, SIZE)) for _ in range(SETS)]
        self.dy = [noise((IMAGES, OUTPUTS, SIZE, SIZE)) for _ in range(SETS)]

    def forward(self, run: Forward) -> float:
        """Seconds of one forward pass."""
        return graph_seconds(lambda: [run(x, self.weight) for x in self.x]) / SETS

    def gradient(self, run: Gradient) -> float:
        """Seconds of one weight gradient."""
        return graph_seconds(lambda: [run(x, dy, self.weight) for x, dy in zip(self.x, self.dy, strict=True)]) / SETS


def table(kernels: ModuleType, sets: Sets) -> None:
    """Ours beside cuDNN's; a step of BYOL is two forward passes and one gradient."""
    print(f"{'':10}{'forward':>10}{'TB/s':>7}{'gradient':>11}{'TB/s':>7}{'BYOL step':>12}")
    for name, forward, gradient in (
        ("kernels", kernels.forward, kernels.gradient),
        ("cuDNN", cudnn_forward, cudnn_gradient),
    ):
        one, two = sets.forward(forward), sets.gradient(gradient)
        print(
            f"{name:10}{1e6 * one:8.1f}µs{MOVED / one / 1e12:7.2f}{1e6 * two:9.1f}µs{MOVED / two / 1e12:7.2f}"
            f"{1e6 * (2 * one + two):10.1f}µs",
            flush=True,
        )


def sweep(kernels: ModuleType, sets: Sets) -> None:
    """Settings of each kernel, with its time."""
    tiles = [(64, 4), (128, 4), (128, 8), (256, 8)]
    settings = {
        "FORWARD": itertools.product((264, 528, 1056, 2048), tiles, (1,)),
        "GRADIENT": itertools.product((128, 256, 384, 512), tiles, (2, 3, 4)),
    }
    for name, choices in settings.items():
        found = []
        for programs, (rows, warps), stages in choices:
            if 2 * rows * (OUTPUTS * stages + 32) > CHIP:
                continue
            launch = kernels.Launch(programs, rows, warps, stages)
            setattr(kernels, name, launch)
            seconds = sets.forward(kernels.forward) if name == "FORWARD" else sets.gradient(kernels.gradient)
            found.append((seconds, launch))
            print(f"{1e6 * seconds:6.1f} µs  {name} {launch}", flush=True)
        setattr(kernels, name, min(found)[1])
        print(f"fastest: {name} = {min(found)[1]}\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--sweep", action="store_true")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("stem: needs CUDA and Triton")
        return
    from fedu2.models import stem_kernel as kernels

    torch.backends.cudnn.benchmark = True
    sets = Sets()
    if arguments.sweep:
        sweep(kernels, sets)
    table(kernels, sets)


if __name__ == "__main__":
    main()
