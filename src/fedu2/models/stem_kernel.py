# mypy: disable-error-code="import-not-found, no-untyped-def, no-untyped-call, untyped-decorator, misc"
"""A 3×3 convolution of images as GPU kernels: Y = P W, and the gradient dW = Pᵀ dY of its weight.

P (N·H·W, 27): each pixel's neighbourhood, row by row, zero beyond the edge. With channels last in memory the 27 values
are three stretches of nine, and a weight (27, O) lies as (O, 27). P is gathered tile by tile, its columns filled up to
32 for the tensor cores, and never stored: what must move is Y once forward, and dY once backward.

Sums are float32. Programs of the gradient leave partial results (parts, O, 32), which a second kernel adds up in the
same order each time: results are reproducible, and nothing waits for the host.

Imported where Triton is; see `fedu2.models.stem`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from fedu2.kernels import INTERPRETED

__all__ = ["convolve", "supported"]


class Launch(NamedTuple):
    """How a kernel is spread over the GPU."""

    programs: int  # at most
    rows: int  # pixels of a tile
    warps: int
    stages: int  # tiles in flight


# For the 132 multiprocessors of an H200, by counting registers and tiles; `benchmarks/stem.py --sweep` measures.
FORWARD = Launch(programs=528, rows=128, warps=4, stages=1)
GRADIENT = Launch(programs=256, rows=128, warps=4, stages=3)
WIDEST = 128  # outputs
DTYPE = torch.float32 if INTERPRETED else torch.bfloat16  # the interpreter multiplies no matrices of bfloat16


def supported(x: Tensor, weight: Tensor) -> bool:
    """Whether the kernels take such tensors: images x whose gradient nobody wants, both with channels last."""
    return (
        (x.is_cuda or INTERPRETED)
        and x.dtype == weight.dtype == DTYPE
        and x.ndim == 4
        and x.shape[1] == 3
        and x.numel() > 0
        and not x.requires_grad
        and weight.shape[1:] == (3, 3, 3)
        and weight.shape[0] % 16 == 0
        and weight.shape[0] <= WIDEST
        and x.is_contiguous(memory_format=torch.channels_last)
        and weight.is_contiguous(memory_format=torch.channels_last)
    )


@triton.jit
def neighbourhoods(x_at, pixel, pixels, H: tl.constexpr, W: tl.constexpr):
    """Rows of P, (pixel, 32)."""
    k = tl.arange(0, 32)
    down, right = k // 9 - 1, k % 9 // 3 - 1
    row = (pixel // W % H)[:, None] + down[None, :]
    column = (pixel % W)[:, None] + right[None, :]
    inside = (row >= 0) & (row < H) & (column >= 0) & (column < W)
    exists = (pixel < pixels)[:, None] & (k < 27)[None, :]
    place = pixel[:, None] * 3 + (down * (3 * W) + k % 9 - 3)[None, :]
    return tl.load(x_at + place, mask=inside & exists, other=0.0)


@triton.jit
def tile(index, pixels, OUTPUTS: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr):
    """Where a tile of Y begins, where its elements lie from there, and which of them exist."""
    row, column = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    begin = tl.cast(index, tl.int64) * (ROWS * OUTPUTS)
    exists = (index * ROWS + row < pixels)[:, None] & (column < OUTPUTS)[None, :]
    return begin, row[:, None] * OUTPUTS + column[None, :], exists


@triton.jit(do_not_specialize=["pixels", "steps"])
def forward_kernel(
    x_at,
    weight_at,
    y_at,
    pixels,
    steps,
    H: tl.constexpr,
    W: tl.constexpr,
    OUTPUTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Y over the tiles of program p: p, p + programs, ..."""
    k, column = tl.arange(0, 32), tl.arange(0, COLUMNS)
    known = (k < 27)[:, None] & (column < OUTPUTS)[None, :]
    weight = tl.load(weight_at + column[None, :] * 27 + k[:, None], mask=known, other=0.0)
    for step in tl.range(0, steps, num_stages=STAGES):
        index = tl.program_id(0) + step * tl.num_programs(0)
        patches = neighbourhoods(x_at, index * ROWS + tl.arange(0, ROWS), pixels, H, W)
        y = tl.dot(patches, weight, input_precision="ieee")
        begin, place, exists = tile(index, pixels, OUTPUTS, COLUMNS, ROWS)
        tl.store(y_at + begin + place, y.to(y_at.dtype.element_ty), mask=exists)


@triton.jit(do_not_specialize=["pixels", "steps"])
def gradient_kernel(
    x_at,
    dy_at,
    parts_at,
    pixels,
    steps,
    H: tl.constexpr,
    W: tl.constexpr,
    OUTPUTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """dYᵀ P, (O, 32), over the tiles of program p: p, p + programs, ..."""
    total = tl.zeros([COLUMNS, 32], tl.float32)
    for step in tl.range(0, steps, num_stages=STAGES):
        index = tl.program_id(0) + step * tl.num_programs(0)
        begin, place, exists = tile(index, pixels, OUTPUTS, COLUMNS, ROWS)
        dy = tl.load(dy_at + begin + place, mask=exists, other=0.0)
        patches = neighbourhoods(x_at, index * ROWS + tl.arange(0, ROWS), pixels, H, W)
        total = tl.dot(tl.trans(dy), patches, total, input_precision="ieee")
    k, column = tl.arange(0, 32), tl.arange(0, COLUMNS)
    at = parts_at + (tl.program_id(0) * OUTPUTS + column)[:, None] * 32 + k[None, :]
    tl.store(at, total, mask=(column < OUTPUTS)[:, None])


@triton.jit
def sum_kernel(parts_at, dweight_at, parts, OUTPUTS: tl.constexpr, PARTS: tl.constexpr):
    """The 27 gradients of one output, from all parts."""
    part, k, column = tl.arange(0, PARTS), tl.arange(0, 32), tl.program_id(0)
    at = parts_at + (part * OUTPUTS + column)[:, None] * 32 + k[None, :]
    total = tl.sum(tl.load(at, mask=(part < parts)[:, None], other=0.0), 0)
    tl.store(dweight_at + column * 27 + k, total.to(dweight_at.dtype.element_ty), mask=k < 27)


def forward(x: Tensor, weight: Tensor) -> Tensor:
    """Y as (N, O, H, W), channels last."""
    images, _, height, width = x.shape
    y = x.new_empty(images, height, width, len(weight)).permute(0, 3, 1, 2)
    programs, sizes = cover(FORWARD, x, weight)
    forward_kernel[(programs,)](x, weight, y, *sizes, FORWARD.stages, num_warps=FORWARD.warps)
    return y


def gradient(x: Tensor, dy: Tensor, weight: Tensor) -> Tensor:
    """dW in the memory order and the type of the weight."""
    programs, sizes = cover(GRADIENT, x, weight)
    parts = x.new_empty(programs, len(weight), 32, dtype=torch.float32)
    dweight = torch.empty_like(weight)
    gradient_kernel[(programs,)](x, dy, parts, *sizes, GRADIENT.stages, num_warps=GRADIENT.warps)
    sum_kernel[(len(weight),)](parts, dweight, programs, len(weight), triton.next_power_of_2(programs), num_warps=8)
    return dweight


def cover(launch: Launch, x: Tensor, weight: Tensor) -> tuple[int, tuple[int, ...]]:
    """How many programs, and what both kernels must know: pixels, steps, H, W, OUTPUTS, COLUMNS, ROWS."""
    images, _, height, width = x.shape
    pixels, outputs = images * height * width, len(weight)
    tiles = -(-pixels // launch.rows)
    programs, columns = min(launch.programs, tiles), triton.next_power_of_2(outputs)
    return programs, (pixels, -(-tiles // programs), height, width, outputs, columns, launch.rows)


class Convolution(torch.autograd.Function):
    """The kernels as one differentiable function; images get no gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        with torch.cuda.device_of(x):
            return forward(x, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[None, Tensor]:
        x, weight = ctx.saved_tensors
        with torch.cuda.device_of(x):
            return None, gradient(x, dy.contiguous(memory_format=torch.channels_last), weight)


def convolve(x: Tensor, weight: Tensor) -> Tensor:
    """The convolution of x (N, 3, H, W) with weight (O, 3, 3, 3), stride and padding 1; see `supported`."""
    y: Tensor = Convolution.apply(x, weight)
    return y
