"""Unbalanced optimal transport with quadratic penalties on the marginals.

    P(π) = ⟨C, π⟩ + τ_a/2 ‖π1 − a‖² + τ_b/2 ‖πᵀ1 − b‖²                 minimised over π ≥ 0
    D(f, g) = ⟨f, a⟩ − ‖f‖²/2τ_a + ⟨g, b⟩ − ‖g‖²/2τ_b                   maximised over f_i + g_j ≤ C_ij

At the optimum π1 = a − f/τ_a, πᵀ1 = b − g/τ_b, and π lives where f_i + g_j = C_ij. As f ≤ τ_a a and g ≤ τ_b b there,
an entry carries mass only if C_ij < τ_a a_i + τ_b b_j. For any plan and any feasible pair

    P(π) − D(f, g) = ⟨π, C − f − g⟩ + τ_a/2 ‖π1 − a + f/τ_a‖² + τ_b/2 ‖πᵀ1 − b + g/τ_b‖²,

a sum of terms ≥ 0: the certificate that comes with every plan, free of cancellation.

Solvers, by name. A plan serves as a gradient (π* held fixed), so they are judged by the gradient on Z. Worst cases of
128 × 128, d = 256 and 512, τ = 0.8, rounded down from `benchmarks/gradients.py`:

    solver     method                           batches  relative gap   cosine to exact   norm / exact   CPU
    sinkhorn   40 annealed Sinkhorn iterations  plain    2e-4           0.96              1.02–1.07      13 ms
                                                tight    6e-4           0.95              0.93–1.05
    fast       20 of them, ending warmer        plain    2e-4           0.96              0.96–1.05      7 ms
                                                tight    7e-4           0.77              0.49–0.99
    exact      interior point in float64                 1e-10          1.00              1.00           25 ms

plain: spread, loosely clustered, of rank 8, nearly collapsed to one point.  tight: 2, 4 or 8 points, or two opposite
ones, each surrounded by a cloud of spread 0.01 to 0.05; or one cloud and an outlier. There a warm solver smears the
clouds, and its gap does not betray it. CPU: one thread, two problems in one call. The larger τ, the less accurate
`sinkhorn`: cosine 0.96 (plain) and 0.90 (tight) at τ = 2, 0.93 and 0.87 at τ = 10, where the gap is 5e-3.

On a GPU `sinkhorn` and `fast` are one kernel with the same results up to rounding: `sinkhorn_kernel`.

References: L. Chapel et al. 2021, Unbalanced OT through non-negative penalized linear regression (the problem and the
multiplicative step); A. Thibault et al. 2021, Overrelaxed Sinkhorn-Knopp; S. Mehrotra 1992 (interior point).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial

import torch
from torch import Tensor

from fedu2.errors import UsageError
from fedu2.kernels import ready
from fedu2.registry import Registry

__all__ = ["Plan", "deviation", "solve", "solvers", "warm"]

PAIRS = (-2, -1)  # the axes of one problem
LARGEST, LONGEST = 32768, 1024  # entries and sides of a problem for the kernel: it must fit on the chip


@dataclass(frozen=True)
class Plan:
    """A transport plan with its certificate; leading axes are those of the cost."""

    plan: Tensor  # π (..., N, M)
    f: Tensor  # feasible dual point (..., N)
    g: Tensor  # and (..., M)
    primal: Tensor  # P(π) (...)
    dual: Tensor  # D(f, g) ≤ optimum ≤ P(π)
    gap: Tensor  # (primal − dual) / |primal|; |primal| counts as at least 1e-6 P(0)
    mass: Tensor  # Σ π


@dataclass(frozen=True)
class Problem:
    """A problem as solvers see it: vectors as columns (..., N, 1) or rows (..., 1, M), the cost doubly centred.

    Potentials are f = row + shift + φ and g = column − shift + ψ. Nearly collapsed batches differ in the residual
    alone, often by 1e-4 of the cost; φ, ψ keep full precision on that scale.
    """

    cost: Tensor
    a: Tensor
    b: Tensor
    tau_a: float
    tau_b: float
    row: Tensor
    column: Tensor
    residual: Tensor  # min(C, ceiling) − row − column
    scale: Tensor  # largest |cost| below the ceiling (..., 1, 1)

    @classmethod
    def build(cls, cost: Tensor, a: Tensor, b: Tensor, tau_a: float, tau_b: float) -> Problem:
        a, b = a.unsqueeze(-1), b.unsqueeze(-2)
        # Costs far above τ_a a_i + τ_b b_j never carry mass: lowering them leaves the optimum as it is and keeps
        # outliers from setting the temperature.
        limit = tau_a * a + tau_b * b
        low = torch.minimum(cost, limit + limit.mean(PAIRS, keepdim=True))
        half_mean = low.mean(PAIRS, keepdim=True) / 2
        row, column = low.mean(-1, keepdim=True) - half_mean, low.mean(-2, keepdim=True) - half_mean
        scale = low.abs().amax(PAIRS, keepdim=True).clamp(min=1e-15)
        return cls(cost, a, b, tau_a, tau_b, row, column, low - row - column, scale)

    def worth(self) -> Tensor:
        """(τ_a a_i + τ_b b_j − C_ij)₊, what moving a first unit of mass saves."""
        return (self.tau_a * self.a + self.tau_b * self.b - self.cost).clamp(min=0)

    def value(self, plan: Tensor) -> Tensor:
        """P(π), one number a problem, shaped (..., 1, 1)."""
        off_a, off_b = plan.sum(-1, keepdim=True) - self.a, plan.sum(-2, keepdim=True) - self.b
        return total(self.cost * plan) + self.tau_a / 2 * total(off_a**2) + self.tau_b / 2 * total(off_b**2)

    def distance(self, plan: Tensor, phi: Tensor, psi: Tensor, shift: Tensor | float) -> Tensor:
        """P(π) − D(f, g) as the sum of non-negative terms above, shaped (..., 1, 1)."""
        off_a = plan.sum(-1, keepdim=True) - self.a + (self.row + shift + phi) / self.tau_a
        off_b = plan.sum(-2, keepdim=True) - self.b + (self.column - shift + psi) / self.tau_b
        slack = (self.residual - phi - psi).clamp(min=0)
        return total(plan * slack) + self.tau_a / 2 * total(off_a**2) + self.tau_b / 2 * total(off_b**2)

    def relative(self, difference: Tensor, primal: Tensor) -> Tensor:
        """A difference of values against |primal|, with a floor for problems whose optimal value is zero."""
        nothing_moved = self.tau_a / 2 * total(self.a**2) + self.tau_b / 2 * total(self.b**2)
        floor = (1e-6 * nothing_moved).clamp(min=torch.finfo(primal.dtype).tiny)
        return difference / torch.maximum(primal.abs(), floor)

    def imbalance(self, phi: Tensor, psi: Tensor, shift: Tensor) -> Tensor:
        """The change of shift that maximises D: both sides then offer the same mass."""
        offered = total(self.a - (self.row + shift + phi) / self.tau_a)
        wanted = total(self.b - (self.column - shift + psi) / self.tau_b)
        return (offered - wanted) / (phi.shape[-2] / self.tau_a + psi.shape[-1] / self.tau_b)


State = tuple[Tensor, Tensor, Tensor, Tensor]  # π, φ, ψ, shift; φ and ψ need not be feasible


@dataclass(frozen=True)
class Schedule:
    """Of Sinkhorn: ε goes from `start` to `end` times the deviation of the doubly centred cost."""

    iterations: int
    start: float
    end: float
    relaxation: float


@dataclass(frozen=True)
class Solver:
    """A method and the least precision that it computes in; one with a schedule exists as a fused kernel, too."""

    method: Callable[[Problem], State]
    dtype: torch.dtype = torch.float32
    schedule: Schedule | None = None


solvers: Registry[Solver] = Registry("transport solver")


def solve(cost: Tensor, a: Tensor, b: Tensor, tau_a: float, tau_b: float, *, solver: str | Solver = "sinkhorn") -> Plan:
    """Solve all problems of a batch at once; no gradient flows through the plan.

    cost (..., N, M) finite; masses a (..., N) and b (..., M) ≥ 0; penalties τ_a, τ_b > 0. `sinkhorn` and `fast` run a
    fixed number of kernels on fixed shapes without waiting for the device, so that they can be captured in a graph;
    in float32 on a GPU that is one kernel for problems of up to LARGEST entries.
    """
    chosen = solvers[solver] if isinstance(solver, str) else solver
    check(cost, a, b, tau_a, tau_b)
    dtype = torch.promote_types(cost.dtype, chosen.dtype)
    with torch.no_grad(), torch.autocast(cost.device.type, enabled=False):
        cost, a, b = cost.to(dtype), a.to(dtype), b.to(dtype)
        if chosen.schedule and dtype == torch.float32 and fits(*cost.shape[-2:]) and ready(cost.device):
            return by_kernel(cost, a, b, tau_a, tau_b, chosen.schedule)
        problem = Problem.build(cost, a, b, tau_a, tau_b)
        return certify(problem, *chosen.method(problem))


def by_kernel(cost: Tensor, a: Tensor, b: Tensor, tau_a: float, tau_b: float, schedule: Schedule) -> Plan:
    """Build, `sinkhorn` and certify in one kernel."""
    from fedu2.regularizers.sinkhorn_kernel import launch  # needs Triton

    plan, f, g, values = launch(cost, a, b, tau_a, tau_b, **asdict(schedule))
    return Plan(plan, f, g, *values.unbind())


def fits(rows: int, columns: int) -> bool:
    """Whether one program of the kernel can hold such a problem, its sides rounded up to powers of two."""
    entries = 2 ** ((rows - 1).bit_length() + (columns - 1).bit_length())
    return entries <= LARGEST and max(rows, columns) <= LONGEST


def check(cost: Tensor, a: Tensor, b: Tensor, tau_a: float, tau_b: float) -> None:
    """Shapes and penalties; values are not looked at, which would make the host wait for the device."""
    if cost.ndim < 2 or cost.numel() == 0:
        raise UsageError(f"a transport cost has shape (..., N, M) with N, M ≥ 1, not {tuple(cost.shape)}")
    for name, mass, size in (("a", a, cost.shape[-2]), ("b", b, cost.shape[-1])):
        if mass.ndim == 0 or mass.shape[-1] != size:
            raise UsageError(f"masses {name} must have {size} entries for this cost, not {tuple(mass.shape)}")
    for name, tau in (("tau_a", tau_a), ("tau_b", tau_b)):
        if not (tau > 0 and math.isfinite(tau)):
            raise UsageError(f"{name} must be a positive number, not {tau}")


def certify(p: Problem, plan: Tensor, phi: Tensor, psi: Tensor, shift: Tensor) -> Plan:
    """Make the potentials feasible by c-transforms and measure the gap that is left."""
    psi = torch.minimum(p.tau_b * p.b - p.column + shift, (p.residual - phi).amin(-2, keepdim=True))
    phi = torch.minimum(p.tau_a * p.a - p.row - shift, (p.residual - psi).amin(-1, keepdim=True))
    shift = shift + p.imbalance(phi, psi, shift)
    primal, distance = p.value(plan), p.distance(plan, phi, psi, shift)
    return Plan(
        plan=plan,
        f=(p.row + shift + phi).squeeze(-1),
        g=(p.column - shift + psi).squeeze(-2),
        primal=primal.squeeze(PAIRS),
        dual=(primal - distance).squeeze(PAIRS),
        gap=p.relative(distance, primal).squeeze(PAIRS),
        mass=plan.sum(PAIRS),
    )


def total(values: Tensor) -> Tensor:
    """Sum over one problem, shaped (..., 1, 1)."""
    return values.sum(PAIRS, keepdim=True)


def sinkhorn(p: Problem, schedule: Schedule) -> State:
    """Coordinate ascent on the dual smoothed by ε Σ exp((f_i + g_j − C_ij)/ε), while ε falls.

    ε goes geometrically from `start` to `end` times the deviation of the doubly centred cost, never below what the
    precision can resolve. Steps are over-relaxed; the shift between f and g, along which ascent crawls, is solved for.
    """
    scale = root_mean_square(p.residual)
    resolution = 2 * torch.finfo(p.residual.dtype).eps * p.scale
    phi, psi, shift = torch.zeros_like(p.row), torch.zeros_like(p.column), torch.zeros_like(p.scale)
    iterations = schedule.iterations
    for k in range(iterations):
        cooling = schedule.start * (schedule.end / schedule.start) ** (k / max(iterations - 1, 1))
        eps = torch.maximum(cooling * scale, resolution)
        factor = 1.0 if k in (0, iterations - 1) else schedule.relaxation  # the last step must fit its marginal
        soft = soft_minimum(p.residual - psi, eps, -1)
        best = ascend(soft, p.a - (p.row + shift + soft) / p.tau_a, eps, p.tau_a)
        phi = overshoot(phi, best, factor, eps)
        soft = soft_minimum(p.residual - phi, eps, -2)
        best = ascend(soft, p.b - (p.column - shift + soft) / p.tau_b, eps, p.tau_b)
        psi = overshoot(psi, best, factor, eps)
        if k < iterations - 1:
            shift = shift + p.imbalance(phi, psi, shift)
    plan = ((phi + psi - p.residual) / eps).clamp(min=-80).exp()
    return multiplicative_step(p, plan), phi, psi, shift


def root_mean_square(values: Tensor) -> Tensor:
    """Over one problem, shaped (..., 1, 1)."""
    return values.square().mean(PAIRS, keepdim=True).sqrt()


def deviation(cost: Tensor) -> Tensor:
    """Of the doubly centred cost, (..., 1, 1): the unit of the temperatures of a `Schedule`."""
    return root_mean_square(cost - cost.mean(-1, keepdim=True) - cost.mean(-2, keepdim=True) + cost.mean(PAIRS, True))


def overshoot(old: Tensor, best: Tensor, factor: float, eps: Tensor) -> Tensor:
    """Over-relaxation, at most 2ε beyond the best value: further out the exponential makes it diverge."""
    return best + ((factor - 1) * (best - old)).clamp(-2 * eps, 2 * eps)


def soft_minimum(values: Tensor, eps: Tensor, dim: int) -> Tensor:
    """−ε log Σ exp(−values/ε)."""
    least = values.amin(dim, keepdim=True)
    # e^-80 adds nothing to a sum that holds a 1, while results below the float range take CPUs ten times as long.
    weights = ((least - values) / eps).clamp(min=-80).exp()
    return least - eps * weights.sum(dim, keepdim=True).log()


def ascend(soft: Tensor, offered: Tensor, eps: Tensor, tau: float) -> Tensor:
    """The potential that maximises the smoothed dual: soft + ε log r with r + (ε/τ) log r = `offered`.

    r is the mass of the row and `soft` its soft minimum. With ω = rτ/ε this is Wright's ω + log ω = x, here by Newton
    on log ω. The function is convex and the start lies above the root: no step overshoots, two are plenty.
    """
    kappa = eps / tau
    x = offered / kappa - kappa.log()
    log_omega = torch.where(x > 1, x.clamp(min=1).log(), x)
    for _ in range(2):
        omega = log_omega.exp()
        log_omega = (omega * (log_omega - 1) + x) / (omega + 1)
    return soft + eps * (log_omega + kappa.log())


def multiplicative_step(p: Problem, plan: Tensor) -> Tensor:
    """A majorise-minimise step: it never raises P, and empties the entries that are not worth their cost."""
    pull = p.tau_a * plan.sum(-1, keepdim=True) + p.tau_b * plan.sum(-2, keepdim=True)
    return plan * (p.worth() / pull.clamp(min=torch.finfo(plan.dtype).tiny))


def interior_point(p: Problem, *, tolerance: float = 1e-10, most: int = 100) -> State:
    """Mehrotra's predictor-corrector method on π ∘ (C − f − g) = μ, about 20 steps. The host waits in each."""
    worth = p.worth()
    margin = 0.55 * worth.amax(PAIRS, keepdim=True) + 1e-3 * p.scale
    phi, psi = p.tau_a * p.a - p.row - margin, p.tau_b * p.b - p.column - margin
    slack = p.residual - phi - psi  # > 0 here and at every step
    plan = p.cost.shape[-2] * margin / p.tau_a / total(1 / slack) / slack
    going = torch.ones_like(p.scale, dtype=torch.bool)
    for _ in range(most):
        # A solved problem stands still while others of the batch go on; so does one at the end of its precision.
        going = going & (p.relative(p.distance(plan, phi, psi, 0.0), p.value(plan)) > tolerance)
        if not going.any():
            break
        step = newton(p, plan, slack, phi, psi)
        ahead, d_phi, d_psi = step(torch.zeros_like(plan))
        length = largest_step(plan, ahead, slack, drop := d_phi + d_psi)
        mu = (plan * slack).mean(PAIRS, keepdim=True)
        mu_ahead = ((plan + length * ahead) * (slack - length * drop)).mean(PAIRS, keepdim=True)
        change, d_phi, d_psi = step((mu * (mu_ahead / mu) ** 3 + ahead * drop) / slack)
        length = 0.995 * largest_step(plan, change, slack, d_phi + d_psi)
        going = going & total(change).isfinite()
        plan = torch.where(going, plan + length * change, plan)
        phi = torch.where(going, phi + length * d_phi, phi)
        psi = torch.where(going, psi + length * d_psi, psi)
        slack = p.residual - phi - psi
    return plan * (worth > 0), phi, psi, torch.zeros_like(p.scale)


def newton(
    p: Problem, plan: Tensor, slack: Tensor, phi: Tensor, psi: Tensor
) -> Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]:
    """Factorise the linearised optimality conditions; returns the step (δπ, δφ, δψ) as a function of μ/slack.

    With W = π/slack they reduce to [[1/τ_a + W1, W], [Wᵀ, 1/τ_b + Wᵀ1]] (δφ, δψ) = marginal errors; ψ is eliminated.
    """
    weights = plan / slack
    pivot = 1 / p.tau_b + weights.sum(-2, keepdim=True)
    coupling = (weights / pivot) @ weights.mT
    coupling.diagonal(dim1=-2, dim2=-1).zero_()
    # The diagonal as a sum of positive terms: as a difference it would lose all digits once W grows.
    diagonal = 1 / p.tau_a + (weights / pivot).sum(-1) / p.tau_b + coupling.sum(-1)
    factor, _ = torch.linalg.cholesky_ex(torch.diag_embed(diagonal) - coupling)

    def step(target: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        error_a = p.a - (p.row + phi) / p.tau_a - target.sum(-1, keepdim=True)
        error_b = p.b - (p.column + psi) / p.tau_b - target.sum(-2, keepdim=True)
        d_phi = torch.cholesky_solve(error_a - weights @ (error_b / pivot).mT, factor)
        d_psi = (error_b - d_phi.mT @ weights) / pivot
        return target - plan + weights * (d_phi + d_psi), d_phi, d_psi

    return step


def largest_step(plan: Tensor, change: Tensor, slack: Tensor, drop: Tensor) -> Tensor:
    """The longest step, up to 1, that keeps plan + length · change and slack − length · drop non-negative."""
    ratio = torch.maximum(-change / plan, drop / slack).amax(PAIRS, keepdim=True)
    return 1 / ratio.clamp(min=1)


def annealed(schedule: Schedule) -> Solver:
    return Solver(partial(sinkhorn, schedule=schedule), schedule=schedule)


def warm(temperature: float) -> Solver:
    """The plan smoothed at ε = temperature × `deviation`, where a few iterations are enough."""
    return annealed(Schedule(iterations=12, start=max(temperature, 0.2), end=temperature, relaxation=1.0))


solvers.register("sinkhorn")(annealed(Schedule(iterations=40, start=0.2, end=0.0005, relaxation=1.7)))
solvers.register("fast")(annealed(Schedule(iterations=20, start=0.2, end=0.005, relaxation=1.7)))
solvers.register("exact")(Solver(interior_point, torch.float64))
