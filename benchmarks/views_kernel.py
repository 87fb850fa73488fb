"""How long do two random views of a batch take on a GPU? The fused kernel beside the portable operations.

    python -m benchmarks.views_kernel [--batch 128] [--size 32] [--recipe simclr]

Calls are captured in a CUDA graph, as in a training step, with the random numbers that they draw; the time is that of
one call, the median over replays.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial

import torch
from benchmarks.timing import graph_seconds
from torch import Tensor

from fedu2.views import RECIPES, training_views, uniforms

CALLS = 20  # in a graph
Views = tuple[Tensor, Tensor]


def draw_numbers(batch: int, generator: torch.Generator) -> Views:
    """The random numbers of both views."""
    return uniforms(batch, generator), uniforms(batch, generator)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--size", type=int, default=32)
    parser.add_argument("--recipe", choices=[*RECIPES], default="simclr")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("no GPU: nothing to measure")
        return
    from fedu2.views.kernel import fused_views

    recipes, generator = RECIPES[arguments.recipe], torch.Generator("cuda")
    shape = (10_000, 3, arguments.size, arguments.size)
    images = torch.randint(0, 256, shape, dtype=torch.uint8, device="cuda")
    indices = torch.randint(0, len(images), (arguments.batch,), device="cuda")
    views = partial(training_views, images, indices, recipes, generator)
    given = draw_numbers(arguments.batch, generator)

    calls: dict[str, Callable[[], Views]] = {"random numbers": partial(draw_numbers, arguments.batch, generator)}
    for dtype in (torch.float32, torch.bfloat16):
        name = str(dtype).removeprefix("torch.")
        calls[f"portable, {name}"] = partial(views, fused=False, dtype=dtype)
        calls[f"fused, {name}"] = partial(views, fused=True, dtype=dtype)
    for warps in (2, 4, 8, 16):
        kernel = partial(fused_views, images, indices, recipes, given, torch.bfloat16, warps=warps)
        calls[f"kernel alone, {warps} warps"] = kernel
    print(f"two {arguments.recipe} views of {arguments.batch} images of {arguments.size} pixels")
    for name, call in calls.items():
        print(f"{name:24s} {1e6 * graph_seconds(call, CALLS, generator):8.2f} µs")

    generator.manual_seed(0)
    fused = views(fused=True)
    generator.manual_seed(0)
    differences = [(a - b).abs().max().item() for a, b in zip(fused, views(fused=False), strict=True)]
    print(f"largest difference in float32: {max(differences):.1e}")


if __name__ == "__main__":
    main()
