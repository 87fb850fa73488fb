# mypy: disable-error-code="import-not-found, no-untyped-def, no-untyped-call, untyped-decorator, misc"
"""Batch norm, residual and ReLU as GPU kernels: y = relu((x − μ) w/σ + b + residual), and its gradient.

A tensor is seen as rows (G groups of N·H·W) and columns (channels), channels last in memory. A kernel's program owns
a block of columns of one group and visits tiles of rows. What must move, in tensors:

    forward     statistics: x.  apply: x, residual → y.
    backward    sums: dy, dy', x, y → dz.  gradient: dz, x → dx.

dy' is the gradient of a second reader of y, if there is one. dz = (dy + dy')·[y > 0] is also the gradient of the
residual, and is written only if there is one, as y is read only then; otherwise both are found again from x and dy.
Programs of the first kernel leave partial results (G, P, 2, C). The one that comes last, by a ticket that each draws,
combines them, in the same order each time: results are reproducible, and nothing waits for the host. The second kernel
then is a plain pass over the tensor. Short groups take one kernel.

A kernel is compiled for a number of channels, never for a number of rows: clients with few images have batches of
their own size, and compiling takes longer than their training.

Imported where Triton is, by `fedu2.models.norm_kernel`, which launches them.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = [
    "apply_kernel",
    "gradient_kernel",
    "short_backward_kernel",
    "short_forward_kernel",
    "statistics_kernel",
    "sums_kernel",
]

# Nothing is compiled anew for other rows, nor for parameters that lie elsewhere in a model's vector. How wide loads of
# x are follows from C.
kernel = triton.jit(
    do_not_specialize=["rows"],
    do_not_specialize_on_alignment=["weight_at", "bias_at", "running_mean_at", "running_var_at"],
)


@triton.jit
def block(C: tl.constexpr, COLUMNS: tl.constexpr):
    """The program's columns."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    return column, column < C


@triton.jit
def tile(index, group, rows, column, C: tl.constexpr, ROWS: tl.constexpr):
    """Where a tile's elements lie, and which of them exist."""
    row = index * ROWS + tl.arange(0, ROWS)
    place = (group * rows.to(tl.int64) + row)[:, None] * C + column[None, :]
    return place, (row < rows)[:, None] & (column < C)[None, :]


@triton.jit
def activate(off, scale, bias):
    """(x − μ) w/σ + b for off = x − μ."""
    return off * scale[None, :] + bias[None, :]


@triton.jit
def known(saved_at, weight_at, bias_at, group, column, exists, GROUPS: tl.constexpr, C: tl.constexpr):
    """μ, 1/σ, w/σ and b of a group's columns."""
    mean = tl.load(saved_at + group * C + column, mask=exists, other=0.0)
    inverse = tl.load(saved_at + (GROUPS + group) * C + column, mask=exists, other=0.0)
    scale = tl.load(weight_at + column, mask=exists, other=0.0) * inverse
    return mean, inverse, scale, tl.load(bias_at + column, mask=exists, other=0.0)


@triton.jit
def finish(y, residual_at, y_at, place, inside, RELU: tl.constexpr):
    """Add the residual, if there is one, cut at zero, if asked for, and write."""
    if residual_at is not None:
        y += tl.load(residual_at + place, mask=inside, other=0.0).to(tl.float32)
    if RELU:
        y = tl.where(y < 0, 0.0, y)  # NaN stays
    tl.store(y_at + place, y.to(y_at.dtype.element_ty), mask=inside)


@triton.jit
def comes_last(tickets_at, programs):
    """Whether all other programs of this block of columns have left their parts, which can be read then."""
    tl.debug_barrier()  # until all threads of this program have left theirs
    at = tickets_at + tl.program_id(0)
    last = tl.atomic_add(at, 1, sem="acq_rel") == programs - 1
    if last:
        tl.store(at, 0)  # for the next launch
    return last


@triton.jit
def combine(parts_at, group, rows, column, exists, C: tl.constexpr, PARTS: tl.constexpr, ROWS: tl.constexpr):
    """Mean and variance of a group from its parts; ROWS of a tile of `statistics_kernel`."""
    part = tl.arange(0, PARTS)
    at = parts_at + ((group * PARTS + part) * 2)[:, None] * C + column[None, :]
    mean = tl.load(at, mask=exists[None, :], other=0.0, cache_modifier=".cg")
    squares = tl.load(at + C, mask=exists[None, :], other=0.0, cache_modifier=".cg")
    tiles = tl.cdiv(rows, ROWS)
    count = tl.cdiv(tiles - part, PARTS) * ROWS - tl.where(part == (tiles - 1) % PARTS, tiles * ROWS - rows, 0)
    count = count.to(tl.float32)[:, None]
    overall = tl.sum(mean * (count / rows), 0)
    off = mean - overall[None, :]
    return overall, tl.sum(squares + off * off * count, 0) / rows


@triton.jit
def follow(running_at, new, momentum, column, exists):
    """r ← (1 − m) r + m s."""
    old = tl.load(running_at + column, mask=exists, other=0.0)
    tl.store(running_at + column, (1 - momentum) * old + momentum * new, mask=exists)


@kernel
def statistics_kernel(
    x_at,
    parts_at,
    tickets_at,
    saved_at,  # (2, G, C): mean, 1/σ
    running_mean_at,
    running_var_at,
    rows,
    momentum,
    eps,
    GROUPS: tl.constexpr,
    PARTS: tl.constexpr,
    C: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Mean and sum of squared deviations over the tiles part, part + P, ...: Welford's update, in each place apart."""
    column, exists = block(C, COLUMNS)
    part, parts, group = tl.program_id(1), tl.num_programs(1), tl.program_id(2)
    mean = tl.zeros([ROWS, COLUMNS], tl.float32)
    squares = tl.zeros([ROWS, COLUMNS], tl.float32)
    seen = 0.0
    for index in tl.range(part, tl.cdiv(rows, ROWS), parts, num_stages=STAGES):
        place, inside = tile(index, group, rows, column, C, ROWS)
        x = tl.load(x_at + place, mask=inside, other=0.0).to(tl.float32)
        off = tl.where(inside, x - mean, 0.0)  # only the last tile has gaps: a place that is empty stays so
        seen += 1.0
        mean += off * (1.0 / seen)
        squares += off * (x - mean)
    first = part * ROWS + tl.arange(0, ROWS)
    count = tl.cdiv(rows - first, parts * ROWS).to(tl.float32)
    overall = tl.sum(mean * count[:, None], 0) / tl.maximum(tl.sum(count, 0), 1.0)  # a part may have no tile
    off = mean - overall[None, :]
    at = parts_at + (group * parts + part) * 2 * C + column
    tl.store(at, overall, mask=exists)
    tl.store(at + C, tl.sum(squares + off * off * count[:, None], 0), mask=exists)
    if comes_last(tickets_at, PARTS * GROUPS):
        for g in tl.static_range(GROUPS):
            seen_mean, variance = combine(parts_at, g, rows, column, exists, C, PARTS, ROWS)
            tl.store(saved_at + g * C + column, seen_mean, mask=exists)
            tl.store(saved_at + (GROUPS + g) * C + column, tl.rsqrt(variance + eps), mask=exists)
            follow(running_mean_at, seen_mean, momentum, column, exists)
            follow(running_var_at, variance * (rows / (rows - 1.0)), momentum, column, exists)


@kernel
def apply_kernel(
    x_at,
    residual_at,
    y_at,
    saved_at,
    weight_at,
    bias_at,
    rows,
    RELU: tl.constexpr,
    GROUPS: tl.constexpr,
    C: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    STAGES: tl.constexpr,
):
    column, exists = block(C, COLUMNS)
    turn, turns, group = tl.program_id(1), tl.num_programs(1), tl.program_id(2)
    mean, _, scale, bias = known(saved_at, weight_at, bias_at, group, column, exists, GROUPS, C)
    tiles = tl.cdiv(rows, ROWS)
    for index in tl.range(turn, tiles, turns, num_stages=STAGES):
        # Backwards: the rows that the statistics read last are still in the cache.
        place, inside = tile(tiles - 1 - index, group, rows, column, C, ROWS)
        x = tl.load(x_at + place, mask=inside, other=0.0).to(tl.float32)
        y = activate(x - mean[None, :], scale, bias)
        finish(y, residual_at, y_at, place, inside, RELU)


@triton.jit
def gradient_of_sum(dy_at, again_at, y_at, off, scale, bias, place, inside, RELU: tl.constexpr):
    """dz = (dy + dy')·[y > 0], the gradient of what ReLU sees; without y the mask comes from x."""
    dz = tl.load(dy_at + place, mask=inside, other=0.0).to(tl.float32)
    if again_at is not None:
        dz += tl.load(again_at + place, mask=inside, other=0.0).to(tl.float32)
    if RELU:
        if y_at is not None:
            dz = tl.where(tl.load(y_at + place, mask=inside, other=0.0) <= 0, 0.0, dz)
        else:
            dz = tl.where(activate(off, scale, bias) <= 0, 0.0, dz)
    return dz


@triton.jit
def add_up(parts_at, group, column, exists, C: tl.constexpr, PARTS: tl.constexpr):
    """Σ dz and Σ dz·x̂ of a group from its parts."""
    at = parts_at + ((group * PARTS + tl.arange(0, PARTS)) * 2)[:, None] * C + column[None, :]
    plain = tl.load(at, mask=exists[None, :], other=0.0, cache_modifier=".cg")
    weighted = tl.load(at + C, mask=exists[None, :], other=0.0, cache_modifier=".cg")
    return tl.sum(plain, 0), tl.sum(weighted, 0)


@kernel
def sums_kernel(
    dy_at,
    again_at,
    x_at,
    y_at,
    dz_at,
    parts_at,
    tickets_at,
    means_at,  # (2, G, C): mean dz, mean(dz·x̂)/σ
    dweight_at,
    dbias_at,
    saved_at,
    weight_at,
    bias_at,
    rows,
    RELU: tl.constexpr,
    GROUPS: tl.constexpr,
    PARTS: tl.constexpr,
    C: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Σ dz and Σ dz·x̂ over the tiles part, part + P, ..., x̂ = (x − μ)/σ."""
    column, exists = block(C, COLUMNS)
    part, parts, group = tl.program_id(1), tl.num_programs(1), tl.program_id(2)
    mean, inverse, scale, bias = known(saved_at, weight_at, bias_at, group, column, exists, GROUPS, C)
    plain = tl.zeros([ROWS, COLUMNS], tl.float32)
    weighted = tl.zeros([ROWS, COLUMNS], tl.float32)
    for index in tl.range(part, tl.cdiv(rows, ROWS), parts, num_stages=STAGES):
        place, inside = tile(index, group, rows, column, C, ROWS)
        off = tl.load(x_at + place, mask=inside, other=0.0).to(tl.float32) - mean[None, :]
        dz = gradient_of_sum(dy_at, again_at, y_at, off, scale, bias, place, inside, RELU)
        if dz_at is not None:
            rounded = dz.to(dz_at.dtype.element_ty)
            tl.store(dz_at + place, rounded, mask=inside)
            dz = rounded.to(tl.float32)  # the next kernel subtracts the mean of what it reads
        plain += dz
        weighted += dz * off
    at = parts_at + (group * parts + part) * 2 * C + column
    tl.store(at, tl.sum(plain, 0), mask=exists)
    tl.store(at + C, tl.sum(weighted, 0) * inverse, mask=exists)
    if comes_last(tickets_at, PARTS * GROUPS):
        dweight = tl.zeros([COLUMNS], tl.float32)
        dbias = tl.zeros([COLUMNS], tl.float32)
        for g in tl.static_range(GROUPS):
            theirs, weighted_theirs = add_up(parts_at, g, column, exists, C, PARTS)
            inverse = tl.load(saved_at + (GROUPS + g) * C + column, mask=exists, other=0.0)
            tl.store(means_at + g * C + column, theirs / rows, mask=exists)
            tl.store(means_at + (GROUPS + g) * C + column, inverse * weighted_theirs / rows, mask=exists)
            dbias += theirs
            dweight += weighted_theirs
        tl.store(dweight_at + column, dweight, mask=exists)
        tl.store(dbias_at + column, dbias, mask=exists)


@kernel
def gradient_kernel(
    dy_at,
    again_at,
    x_at,
    dx_at,
    means_at,
    saved_at,
    weight_at,
    bias_at,
    rows,
    RELU: tl.constexpr,  # dy is not masked yet
    GROUPS: tl.constexpr,
    C: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """dx = w/σ (dz − mean dz − x̂ mean(dz·x̂)), means over the group."""
    column, exists = block(C, COLUMNS)
    turn, turns, group = tl.program_id(1), tl.num_programs(1), tl.program_id(2)
    mean, _, scale, bias = known(saved_at, weight_at, bias_at, group, column, exists, GROUPS, C)
    level = tl.load(means_at + group * C + column, mask=exists, other=0.0)
    slope = tl.load(means_at + (GROUPS + group) * C + column, mask=exists, other=0.0)
    tiles = tl.cdiv(rows, ROWS)
    for index in tl.range(turn, tiles, turns, num_stages=STAGES):
        place, inside = tile(tiles - 1 - index, group, rows, column, C, ROWS)
        off = tl.load(x_at + place, mask=inside, other=0.0).to(tl.float32) - mean[None, :]
        dz = gradient_of_sum(dy_at, again_at, None, off, scale, bias, place, inside, RELU)
        dx = scale[None, :] * (dz - level[None, :] - off * slope[None, :])
        tl.store(dx_at + place, dx.to(dx_at.dtype.element_ty), mask=inside)


@kernel
def short_forward_kernel(
    x_at,
    residual_at,
    y_at,
    saved_at,
    weight_at,
    bias_at,
    running_mean_at,
    running_var_at,
    rows,
    momentum,
    eps,
    RELU: tl.constexpr,
    GROUPS: tl.constexpr,
    C: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Statistics and apply: a program holds all rows of a group, and does one group after another."""
    column, exists = block(C, COLUMNS)
    weight = tl.load(weight_at + column, mask=exists, other=0.0)
    bias = tl.load(bias_at + column, mask=exists, other=0.0)
    running_mean = tl.load(running_mean_at + column, mask=exists, other=0.0)
    running_var = tl.load(running_var_at + column, mask=exists, other=0.0)
    for group in tl.static_range(GROUPS):
        place, inside = tile(0, group, rows, column, C, ROWS)
        x = tl.load(x_at + place, mask=inside, other=0.0).to(tl.float32)
        mean = tl.sum(x, 0) / rows
        off = tl.where(inside, x - mean[None, :], 0.0)
        variance = tl.sum(off * off, 0) / rows
        inverse = tl.rsqrt(variance + eps)
        y = activate(off, weight * inverse, bias)
        finish(y, residual_at, y_at, place, inside, RELU)
        tl.store(saved_at + group * C + column, mean, mask=exists)
        tl.store(saved_at + (GROUPS + group) * C + column, inverse, mask=exists)
        running_mean = (1 - momentum) * running_mean + momentum * mean
        running_var = (1 - momentum) * running_var + momentum * (variance * (rows / (rows - 1.0)))
    tl.store(running_mean_at + column, running_mean, mask=exists)
    tl.store(running_var_at + column, running_var, mask=exists)


@kernel
def short_backward_kernel(
    dy_at,
    again_at,
    x_at,
    y_at,
    dz_at,
    dx_at,
    dweight_at,
    dbias_at,
    saved_at,
    weight_at,
    bias_at,
    rows,
    RELU: tl.constexpr,
    GROUPS: tl.constexpr,
    C: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Sums and gradient: as `short_forward_kernel`."""
    column, exists = block(C, COLUMNS)
    weight = tl.load(weight_at + column, mask=exists, other=0.0)
    bias = tl.load(bias_at + column, mask=exists, other=0.0)
    dweight = tl.zeros([COLUMNS], tl.float32)
    dbias = tl.zeros([COLUMNS], tl.float32)
    for group in tl.static_range(GROUPS):
        mean = tl.load(saved_at + group * C + column, mask=exists, other=0.0)
        inverse = tl.load(saved_at + (GROUPS + group) * C + column, mask=exists, other=0.0)
        scale = weight * inverse
        place, inside = tile(0, group, rows, column, C, ROWS)
        off = tl.load(x_at + place, mask=inside, other=0.0).to(tl.float32) - mean[None, :]
        dz = gradient_of_sum(dy_at, again_at, y_at, off, scale, bias, place, inside, RELU)
        if dz_at is not None:
            tl.store(dz_at + place, dz.to(dz_at.dtype.element_ty), mask=inside)
        plain, weighted = tl.sum(dz, 0), tl.sum(dz * off, 0) * inverse
        level, slope = plain / rows, inverse * weighted / rows
        dx = scale[None, :] * (dz - level[None, :] - off * slope[None, :])
        tl.store(dx_at + place, dx.to(dx_at.dtype.element_ty), mask=inside)
        dbias += plain
        dweight += weighted
    tl.store(dweight_at + column, dweight, mask=exists)
    tl.store(dbias_at + column, dbias, mask=exists)
