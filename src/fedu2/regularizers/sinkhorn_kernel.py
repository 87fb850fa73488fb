"""`transport.solve` by Sinkhorn as one GPU kernel: one program a problem, from the cost to the certified plan.

The cost enters the chip once; weights, potentials and marginals stay there. Iterations are those of
`transport.sinkhorn`, with one exponential an entry instead of two and no search for minima: rows are weighed relative
to their last potential, w_ij = exp((φ_i + ψ_j − R_ij)/ε), and columns, once φ has moved to φ', by
w_ij exp((φ'_i − φ_i)/ε). That fails where a potential must rise by more than some 60ε, for then all its weights vanish.
If mass hangs on it, the problem is solved carefully from there on: rows relative to min_j (R_ij − ψ_j), vanishing
columns by min_i (R_ij − φ_i). So are the first iterations, where jumps are common. FUR's batches need it nowhere else.

Speed rests on layouts, too. A tile (N, M) is spread over all threads, so that each sees many rows and columns; written
naively, each would also update the potentials of all of them, and these updates would take most of the time. `exchange`
moves vectors between the tile's layout and one entry a thread.

It is compiled for sizes rounded up to powers of two: batches of some other size need no compilation of their own.

Imported where Triton is; see `fedu2.regularizers.transport`.
"""

# Triton's language has no types, and Triton itself may be missing.
# mypy: disable-error-code="import-not-found,import-untyped,no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from fedu2 import kernels

__all__ = ["launch"]

LN2 = tl.constexpr(math.log(2))
CAREFUL = tl.constexpr(4)  # first iterations, in which potentials may jump
FAINT = tl.constexpr(math.exp(-60))  # a sum of weights that says nothing but that it is small
NO_MASS = tl.constexpr(-30.0)  # log of a mass that does not matter
STEEP = tl.constexpr(40 / math.log(2))  # log₂ of how much a row may grow
ALARM = tl.constexpr(1e30)  # travels with a sum of masses to all threads
NOWHERE = tl.constexpr(1e30)  # residual of entries that only fill up the tile
SMALLEST = 16  # sides of a tile
INTERPRETED = tl.constexpr(kernels.INTERPRETED)


@triton.jit
def exchange(vector, index):
    """The same vector in the layout of `index`; a gather is what the compiler does not optimise away."""
    return tl.gather(vector, index, 0)


@triton.jit
def total(tile, j):
    """Columns first: a thread holds few of them, and their sums take no shuffles."""
    return tl.sum(exchange(tl.sum(tile, 0), j), 0)


@triton.jit
def log2(x):
    if INTERPRETED:
        return tl.log2(x)
    else:
        return libdevice.fast_log2f(x)


@triton.jit
def divide(x, y):
    if INTERPRETED:
        return x / y
    else:
        return libdevice.fast_dividef(x, y)


@triton.jit
def ascend(old, soft, offset, mass, softness, log_kappa, eps, factor):
    """The next potential by `transport.ascend` and `overshoot`, and log r.

    offset + potential is the dual variable; softness = 1/τ, κ = ε/τ.
    """
    x = (mass - (offset + soft) * softness) * tl.exp(-log_kappa) - log_kappa
    log_omega = tl.where(x > 1, LN2 * log2(tl.maximum(x, 1.0)), x)
    for _ in tl.static_range(2):
        omega = tl.exp(log_omega)
        log_omega = divide(omega * (log_omega - 1) + x, omega + 1)
    log_mass = log_omega + log_kappa
    best = soft + eps * log_mass
    return best + tl.minimum(tl.maximum((factor - 1) * (best - old), -2 * eps), 2 * eps), log_mass


@triton.jit
def difference(rows, columns):
    """Σ rows − Σ columns, by one reduction where the tile is square."""
    if rows.shape[0] == columns.shape[0]:
        return tl.sum(rows - columns, 0)
    else:
        return tl.sum(rows, 0) - tl.sum(columns, 0)


@triton.jit(do_not_specialize=["n", "m", "a_stride", "b_stride"])
def sinkhorn_kernel(
    cost_at,  # (problems, N, COLUMNS): a stride that the compiler does not know would cost many registers
    a_at,  # (problems, N), or one for all: stride 0
    b_at,
    plan_at,
    f_at,
    g_at,
    values_at,  # (4, problems): primal, dual, gap, mass
    a_stride,
    b_stride,
    tau_a,
    tau_b,
    start,
    cooling,  # log₂ of ε's factor from one iteration to the next
    relaxation,
    n,
    m,
    ITERATIONS: tl.constexpr,
    ROWS: tl.constexpr,  # N and M as powers of two
    COLUMNS: tl.constexpr,
    FULL: tl.constexpr,  # N = ROWS and M = COLUMNS: the compiler drops masks
):
    N, M = (ROWS, COLUMNS) if FULL else (n, m)
    problem = tl.program_id(0)
    i, j = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    in_rows, in_columns = i < N, j < M
    inside = in_rows[:, None] & in_columns[None, :]
    place = i[:, None] * COLUMNS + j[None, :]
    cost_at += problem.to(tl.int64) * (N * COLUMNS)
    plan_at += problem.to(tl.int64) * (N * COLUMNS)
    a = tl.load(a_at + problem * a_stride + i, mask=in_rows, other=0.0)
    b = tl.load(b_at + problem * b_stride + j, mask=in_columns, other=0.0)
    cost = tl.load(cost_at + place, mask=inside, other=0.0)

    # Problem.build
    ceiling = tau_a * tl.sum(a, 0) / N + tau_b * tl.sum(b, 0) / M
    limit = exchange(tau_a * a, i)[:, None] + exchange(tau_b * b, j)[None, :]
    low = tl.where(inside, tl.minimum(cost, limit + ceiling), 0.0)
    row, column = exchange(tl.sum(low, 1), i) / M, exchange(tl.sum(low, 0), j) / N
    half_mean = tl.sum(row, 0) / (2 * N)
    row, column = row - half_mean, column - half_mean
    scale = tl.maximum(tl.max(exchange(tl.max(tl.abs(low), 0), j), 0), 1e-15)
    residual = low - exchange(row, i)[:, None] - exchange(column, j)[None, :]
    squares = total(tl.where(inside, residual * residual, 0.0), j)
    residual = tl.where(inside, residual, NOWHERE)

    # sinkhorn; temperatures by their logarithm
    log_tau_a, log_tau_b = log2(tau_a), log2(tau_b)
    first = log2(start * tl.sqrt(squares / (N * M)))
    coldest = log2(2 * 1.1920928955078125e-07 * scale)
    softness_a, softness_b = 1 / tau_a, 1 / tau_b
    share = 1 / (N * softness_a + M * softness_b)
    phi, psi, shift = tl.zeros([ROWS], tl.float32), tl.zeros([COLUMNS], tl.float32), 0.0
    lost = False
    for k in range(ITERATIONS):
        log_eps = tl.maximum(first + cooling * k, coldest)
        eps, sharpness = tl.exp2(log_eps), tl.exp2(-log_eps) / LN2
        last = k == ITERATIONS - 1
        factor = tl.where((k == 0) | last, 1.0, relaxation)
        careful = lost | (k < CAREFUL)

        reference = phi
        if careful:
            least = exchange(tl.min(residual - exchange(psi, j)[None, :], 1), i)
            reference = tl.where(in_rows, least, 0.0)
        exponent = exchange(reference * sharpness, i)[:, None] + exchange(psi * sharpness, j)[None, :]
        weights = tl.exp2(exponent - residual * sharpness)
        weight = tl.maximum(exchange(tl.sum(weights, 1), i), FAINT)
        soft = reference - eps * LN2 * log2(weight)
        phi, log_mass = ascend(phi, soft, row + shift, a, softness_a, LN2 * (log_eps - log_tau_a), eps, factor)
        growth = (phi - reference) * sharpness
        lost_rows = ((weight <= FAINT) & (log_mass > NO_MASS)) | (growth > STEEP)

        growth = exchange(tl.exp2(tl.minimum(growth, STEEP)), i)[:, None]
        weight = tl.maximum(exchange(tl.sum(weights * growth, 0), j), FAINT)
        soft = psi - eps * LN2 * log2(weight)
        faint = weight <= FAINT
        if careful:
            least = exchange(tl.min(residual - exchange(phi, i)[:, None], 0), j)
            soft = tl.where(in_columns & faint, least, soft)
            faint = faint & False
        psi, log_mass = ascend(psi, soft, column - shift, b, softness_b, LN2 * (log_eps - log_tau_b), eps, factor)
        lost_columns = faint & (log_mass > NO_MASS)

        offered = tl.where(lost_rows, ALARM, a - (row + shift + phi) * softness_a)
        wanted = tl.where(lost_columns, -ALARM, b - (column - shift + psi) * softness_b)
        excess = difference(tl.where(in_rows, offered, 0.0), tl.where(in_columns, wanted, 0.0))
        alarm = excess > ALARM / 2
        lost = lost | alarm
        shift += tl.where(alarm | last, 0.0, excess * share)

    # multiplicative_step
    sharpness = tl.exp2(-tl.maximum(first + cooling * (ITERATIONS - 1), coldest)) / LN2
    phis, psis = exchange(phi, i)[:, None], exchange(psi, j)[None, :]
    plan = tl.where(inside, tl.exp2(tl.maximum((phis + psis - residual) * sharpness, -80 / LN2)), 0.0)
    pull_a, pull_b = tau_a * exchange(tl.sum(plan, 1), i), tau_b * exchange(tl.sum(plan, 0), j)
    pull = tl.maximum(exchange(pull_a, i)[:, None] + exchange(pull_b, j)[None, :], 1.1754943508222875e-38)
    cost = tl.load(cost_at + place, mask=inside, other=0.0, eviction_policy="evict_first")
    limit = exchange(tau_a * a, i)[:, None] + exchange(tau_b * b, j)[None, :]
    plan *= tl.maximum(limit - cost, 0.0) / pull
    tl.store(plan_at + place, plan, mask=inside)

    # certify
    psi = tl.minimum(tau_b * b - column + shift, exchange(tl.min(residual - phis, 0), j))
    psis = exchange(psi, j)[None, :]
    phi = tl.minimum(tau_a * a - row - shift, exchange(tl.min(residual - psis, 1), i))
    phis = exchange(phi, i)[:, None]
    offered = tl.where(in_rows, a - (row + shift + phi) * softness_a, 0.0)
    wanted = tl.where(in_columns, b - (column - shift + psi) * softness_b, 0.0)
    shift += difference(offered, wanted) * share
    f, g = row + shift + phi, column - shift + psi
    tl.store(f_at + problem * N + i, f, mask=in_rows)
    tl.store(g_at + problem * M + j, g, mask=in_columns)

    mass_a, mass_b = exchange(tl.sum(plan, 1), i), exchange(tl.sum(plan, 0), j)
    paid = total(cost * plan, j)
    slack = total(plan * tl.maximum(residual - phis - psis, 0.0), j)
    primal = paid + penalty(mass_a - a, in_rows, tau_a) + penalty(mass_b - b, in_columns, tau_b)
    gap_a = penalty(mass_a - a + f * softness_a, in_rows, tau_a)
    gap = slack + gap_a + penalty(mass_b - b + g * softness_b, in_columns, tau_b)
    nothing_moved = penalty(a, in_rows, tau_a) + penalty(b, in_columns, tau_b)
    least = tl.maximum(1e-6 * nothing_moved, 1.1754943508222875e-38)
    at, step = values_at + problem, tl.num_programs(0)
    tl.store(at, primal)
    tl.store(at + step, primal - gap)
    tl.store(at + 2 * step, gap / tl.maximum(tl.abs(primal), least))
    tl.store(at + 3 * step, tl.sum(mass_a, 0))


@triton.jit
def penalty(off, valid, tau):
    """τ/2 ‖off‖²."""
    return tau / 2 * tl.sum(tl.where(valid, off * off, 0.0), 0)


def launch(
    cost: Tensor,
    a: Tensor,
    b: Tensor,
    tau_a: float,
    tau_b: float,
    *,
    iterations: int,
    start: float,
    end: float,
    relaxation: float,
    warps: int = 8,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Plan (..., N, M), f (..., N), g (..., M) and (4, ...): primal, dual, gap, mass. Everything is float32."""
    n, m = cost.shape[-2:]
    batch = torch.broadcast_shapes(cost.shape[:-2], a.shape[:-1], b.shape[:-1])
    rows, columns = (max(triton.next_power_of_2(side), SMALLEST) for side in (n, m))
    cost = F.pad(cost, (0, columns - m)) if m < columns else cost
    cost = cost.expand(*batch, n, columns).contiguous()
    (a, a_stride), (b, b_stride) = over_problems(a, batch), over_problems(b, batch)
    plan, f, g = torch.empty_like(cost), cost.new_empty(*batch, n), cost.new_empty(*batch, m)
    values = cost.new_empty(4, *batch)
    cooling = math.log2(end / start) / max(iterations - 1, 1)
    with torch.cuda.device_of(cost):
        sinkhorn_kernel[(math.prod(batch),)](
            cost, a, b, plan, f, g, values, a_stride, b_stride, float(tau_a), float(tau_b),
            start, cooling, relaxation, n, m, ITERATIONS=iterations,
            ROWS=rows, COLUMNS=columns, FULL=(n, m) == (rows, columns), num_warps=warps, num_stages=1,
        )  # fmt: skip
    return plan[..., :m], f, g, values


def over_problems(mass: Tensor, batch: torch.Size) -> tuple[Tensor, int]:
    """Masses in memory as the kernel reads them, with the stride from one problem to the next."""
    if mass.ndim == 1:
        return mass.contiguous(), 0
    return mass.expand(*batch, mass.shape[-1]).contiguous(), mass.shape[-1]
