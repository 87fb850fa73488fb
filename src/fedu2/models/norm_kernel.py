# mypy: disable-error-code="import-not-found, no-untyped-call, misc"
"""Batch norm, residual and ReLU by the kernels of `norm_triton`: how they are launched, as a differentiable function.

Imported where Triton is; see `fedu2.models.norm`.
"""

from __future__ import annotations

import sys
from functools import cache
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable

from fedu2.kernels import INTERPRETED
from fedu2.models.norm_triton import (
    apply_kernel,
    gradient_kernel,
    short_backward_kernel,
    short_forward_kernel,
    statistics_kernel,
    sums_kernel,
)

__all__ = ["norm", "supported"]


class Launch(NamedTuple):
    """How a kernel is spread over the GPU."""

    programs: int  # about so many
    elements: int  # of a tile
    warps: int
    stages: int  # tiles in flight; 1 lets the compiler decide


# For an H200, which has 132 multiprocessors.
STATISTICS = Launch(programs=132, elements=8192, warps=4, stages=3)
APPLY = Launch(programs=2112, elements=4096, warps=4, stages=1)
SUMS = Launch(programs=132, elements=4096, warps=4, stages=3)
GRADIENT = Launch(programs=2112, elements=4096, warps=4, stages=1)
COLUMNS = 64  # of a tile: 128 bytes in half precision
SHORT, SHORTER = 1024, 128  # rows of a group that one tile holds
SHORT_COLUMNS = 16
SHORT_ELEMENTS = 16384
MOST_BLOCKS = 1024  # of columns
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def supported(x: Tensor) -> bool:
    """Whether x lies in memory as the kernels read it."""
    memory = torch.channels_last if x.ndim == 4 else torch.contiguous_format
    return (
        (x.is_cuda or INTERPRETED)
        and x.dtype in DTYPES
        and x.ndim in (2, 4)
        and x.numel() > 0
        and x.shape[1] <= COLUMNS * MOST_BLOCKS
        and x.is_contiguous(memory_format=memory)
    )


class Grid(NamedTuple):
    """How a kernel covers a tensor."""

    programs: tuple[int, int, int]  # column blocks, programs of a group and block, groups
    columns: int  # of a tile
    rows: int


@cache
def grid(launch: Launch, groups: int, rows: int, channels: int) -> Grid:
    """No more programs than there are tiles."""
    columns = min(COLUMNS, triton.next_power_of_2(channels))
    blocks, tile_rows = triton.cdiv(channels, columns), launch.elements // columns
    programs = max(1, min(triton.cdiv(rows, tile_rows), launch.programs // (blocks * groups)))
    return Grid((blocks, programs, groups), columns, tile_rows)


@cache
def grid_of_parts(launch: Launch, groups: int, channels: int) -> Grid:
    """As many programs for any number of rows, and a power of two: a kernel is compiled to combine so many parts."""
    (blocks, programs, _), columns, rows = grid(launch, groups, sys.maxsize, channels)
    return Grid((blocks, 1 << (programs.bit_length() - 1), groups), columns, rows)


def forward(
    x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor, running_mean: Tensor, running_var: Tensor,
    groups: int, momentum: float, eps: float, relu: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """y, and (2, G, C): mean and 1/σ of each group. Running statistics change in place."""
    channels = x.shape[1]
    rows = x.numel() // channels // groups
    y, saved = torch.empty_like(x), x.new_empty(2, groups, channels, dtype=torch.float32)
    if rows <= SHORT:
        columns, tile_rows, warps = short_tile(rows, channels)
        short_forward_kernel[(triton.cdiv(channels, columns),)](
            x, residual, y, saved, weight, bias, running_mean, running_var, rows, momentum, eps, relu, groups,
            channels, columns, tile_rows, num_warps=warps,
        )  # fmt: skip
        return y, saved
    one = grid_of_parts(STATISTICS, groups, channels)
    two = grid(APPLY, groups, rows, channels)
    parts = x.new_empty(groups, one.programs[1], 2, channels, dtype=torch.float32)
    statistics_kernel[one.programs](
        x, parts, tickets(x), saved, running_mean, running_var, rows, momentum, eps, groups, one.programs[1],
        channels, *one[1:], STATISTICS.stages, num_warps=STATISTICS.warps,
    )  # fmt: skip
    apply_kernel[two.programs](
        x, residual, y, saved, weight, bias, rows, relu, groups,
        channels, *two[1:], APPLY.stages, num_warps=APPLY.warps,
    )  # fmt: skip
    return y, saved


def backward(
    dy: Tensor, again: Tensor | None, x: Tensor, y: Tensor | None, saved: Tensor, weight: Tensor, bias: Tensor,
    relu: bool, residual: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:  # fmt: skip
    """dx, dw, db and, if there was a residual, its gradient."""
    groups, channels = saved.shape[1:]
    rows = x.numel() // channels // groups
    dx, dz = torch.empty_like(x), torch.empty_like(x) if residual and (relu or again is not None) else None
    dweight, dbias = torch.empty_like(weight), torch.empty_like(bias)
    known = (saved, weight, bias, rows)
    if rows <= SHORT:
        columns, tile_rows, warps = short_tile(rows, channels)
        short_backward_kernel[(triton.cdiv(channels, columns),)](
            dy, again, x, y, dz, dx, dweight, dbias, *known, relu, groups, channels, columns, tile_rows,
            num_warps=warps,
        )  # fmt: skip
        return dx, dweight, dbias, dy if dz is None else dz
    one = grid_of_parts(SUMS, groups, channels)
    two = grid(GRADIENT, groups, rows, channels)
    parts = x.new_empty(groups, one.programs[1], 2, channels, dtype=torch.float32)
    means = torch.empty_like(saved)
    sums_kernel[one.programs](
        dy, again, x, y, dz, parts, tickets(x), means, dweight, dbias, *known, relu, groups, one.programs[1],
        channels, *one[1:], SUMS.stages, num_warps=SUMS.warps,
    )  # fmt: skip
    if dz is not None:
        source, rest, masked = dz, None, True
    else:
        source, rest, masked = dy, again, False
    gradient_kernel[two.programs](
        source, rest, x, dx, means, *known, relu and not masked, groups,
        channels, *two[1:], GRADIENT.stages, num_warps=GRADIENT.warps,
    )  # fmt: skip
    return dx, dweight, dbias, dy if dz is None else dz


def tickets(x: Tensor) -> Tensor:
    """Zeros (blocks,), which every kernel leaves as zeros; kernels of one stream, which never overlap, share them."""
    return tickets_of(x.device, torch.cuda.current_stream(x.device).cuda_stream if x.is_cuda else 0)


@cache
def tickets_of(device: torch.device, stream: int) -> Tensor:
    return torch.zeros(MOST_BLOCKS, dtype=torch.int32, device=device)


def short_tile(rows: int, channels: int) -> tuple[int, int, int]:
    """Columns, rows and warps of a program that holds a whole group: 8 elements a thread, and more if need be."""
    tile_rows = SHORTER if rows <= SHORTER else SHORT
    columns = min(SHORT_COLUMNS, max(8, SHORT_ELEMENTS // tile_rows), triton.next_power_of_2(channels))
    return columns, tile_rows, min(16, max(1, columns * tile_rows // 256))


class FusedNorm(torch.autograd.Function):
    """The kernels as one differentiable function, with the output twice: for two readers, whose gradients it adds."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor, *rest: Any) -> Any:
        ctx.set_materialize_grads(False)
        y, saved = forward(x, residual, weight, bias, *rest)
        ctx.relu, ctx.residual = rest[-1], residual is not None
        ctx.save_for_backward(x, y if ctx.relu and ctx.residual else None, saved, weight, bias)
        return y, y.data  # the same memory, and no view: a view would hold on to the tensor that it hangs on

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor | None, again: Tensor | None) -> Any:
        x, y, saved, weight, bias = ctx.saved_tensors
        gradients = [like(g, x) for g in (dy, again) if g is not None]
        if not gradients:
            return (None,) * 10
        dy, again = gradients[0], gradients[1] if len(gradients) == 2 else None
        with torch.cuda.device_of(x):
            dx, dweight, dbias, dz = backward(dy, again, x, y, saved, weight, bias, ctx.relu, ctx.residual)
        return dx, dz if ctx.residual else None, dweight, dbias, *(None,) * 6


def like(tensor: Tensor, x: Tensor) -> Tensor:
    """The tensor in the memory order of x; a copy only where it differs."""
    return tensor.contiguous(memory_format=torch.channels_last if x.ndim == 4 else torch.contiguous_format)


def norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor, running_mean: Tensor, running_var: Tensor,
    *, groups: int, momentum: float, eps: float, relu: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """relu(norm(x) + residual), once for each of two readers; x and residual (N, C) or (N, C, H, W)."""
    residual = None if residual is None else like(residual, x)
    arguments = (x, residual, weight, bias, running_mean, running_var, groups, momentum, eps, relu)
    with torch.cuda.device_of(x):
        if torch.is_grad_enabled():
            return FusedNorm.apply(*arguments)  # type: ignore[no-any-return]
        y, _ = forward(*arguments)
        return y, y
