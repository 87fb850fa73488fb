"""What a machine can do at most: the two rates against which a training step is to be read.

    python -m benchmarks.ceilings [--device cuda]

A step cannot be faster than its multiply-adds at the rate of a large matrix product, nor than its bytes at the rate of
a large copy. Both are measured on random data: a GPU multiplies zeros faster than anything that a network computes.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from itertools import pairwise
from time import perf_counter

import torch

__all__ = ["copy_ceiling", "matmul_ceiling"]

WARM_UP = 5  # untimed calls: libraries load, clocks rise


def matmul_ceiling(
    device: torch.device | str, size: int = 8192, dtype: torch.dtype = torch.bfloat16, repeats: int = 30
) -> float:
    """TFLOP/s of a square product C = A B: 2 size³ operations over the median time."""
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    c = torch.empty_like(a)
    return 2 * size**3 / median_seconds(lambda: torch.mm(a, b, out=c), device, repeats) / 1e12


def copy_ceiling(device: torch.device | str, size: int = 2 * 10**9, repeats: int = 30) -> float:
    """TB/s of a copy of `size` bytes within the device's memory, bytes read + bytes written over the median time."""
    source = torch.randint(256, (size,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / median_seconds(lambda: target.copy_(source), device, repeats) / 1e12


def median_seconds(call: Callable[[], object], device: torch.device | str, repeats: int) -> float:
    """Median time of a call: between CUDA events on a GPU, whose work is asynchronous, by the clock elsewhere."""
    for _ in range(WARM_UP):
        call()
    if torch.device(device).type != "cuda":
        return statistics.median(_by_clock(call, repeats))
    with torch.cuda.device(device):
        return statistics.median(_by_events(call, repeats))


def _by_events(call: Callable[[], object], repeats: int) -> list[float]:
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    marks[0].record()
    for mark in marks[1:]:
        call()
        mark.record()
    torch.cuda.synchronize()  # only now: calls that queue up leave no gaps between them
    return [before.elapsed_time(after) / 1e3 for before, after in pairwise(marks)]


def _by_clock(call: Callable[[], object], repeats: int) -> list[float]:
    seconds = []
    for _ in range(repeats):
        start = perf_counter()
        call()
        seconds.append(perf_counter() - start)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(parser.parse_args().device)
    if device.type == "cuda":
        print(torch.cuda.get_device_name(device))
        print(f"bf16 matrix product of size 8192  {matmul_ceiling(device):8.1f} TFLOP/s")
        print(f"copy of 2 GB                      {copy_ceiling(device):8.3f} TB/s")
    else:
        print(f"{device}, {torch.get_num_threads()} threads")
        print(f"fp32 matrix product of size 1024  {matmul_ceiling(device, 1024, torch.float32, 10):8.3f} TFLOP/s")
        print(f"copy of 0.2 GB                    {copy_ceiling(device, 2 * 10**8, 10):8.3f} TB/s")


if __name__ == "__main__":
    main()
