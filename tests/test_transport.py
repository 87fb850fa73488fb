"""The transport solvers against cvxpy, POT, their own certificates and first principles."""

from __future__ import annotations

import cvxpy
import numpy as np
import ot
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from fedu2.errors import UsageError
from fedu2.regularizers.transport import Plan, solve, solvers

Instance = tuple[Tensor, Tensor, Tensor, float, float]


def uniform(*shape: int, seed: int) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def ones(n: int) -> Tensor:
    return torch.ones(n, dtype=torch.float64)


C = uniform(12, 12, seed=0)
A, B = uniform(12, seed=1), uniform(12, seed=2)
LINE = (uniform(40, 1, seed=3) - uniform(1, 40, seed=4)) ** 2

INSTANCES: dict[str, Instance] = {
    "random": (uniform(12, 17, seed=5), A, uniform(17, seed=6), 0.8, 0.8),
    "constant": (ones(64).reshape(8, 8), ones(8), ones(8), 0.8, 0.8),
    "constant, more rows": (ones(40).reshape(8, 5), ones(8), ones(5), 0.8, 0.8),
    "zero cost": (torch.zeros(8, 6, dtype=torch.float64), ones(8), A[:6], 0.8, 0.3),
    "separable": (A[:, None] + B, A, B, 0.8, 2.0),
    "duplicated points": (uniform(4, 16, seed=7).repeat(3, 1), ones(12), ones(16), 0.8, 0.8),
    "zeros in masses": (C, A * (A > 0.5), B * (B > 0.5), 0.8, 0.8),
    "one side without mass": (C, 0 * A, 1 + B, 0.8, 0.8),
    "no mass": (C, 0 * A, 0 * B, 0.8, 0.8),
    "tiny τ": (C, A, B, 1e-6, 1e-6),
    "large τ": (C, A, B, 50.0, 50.0),
    "opposed τ": (C, A, B, 1e-3, 1e3),
    "one by one": (C[:1, :1], ones(1), ones(1), 0.8, 0.8),
    "one row": (uniform(1, 30, seed=8), A[:1], uniform(30, seed=9), 0.8, 0.8),
    "one column": (uniform(30, 1, seed=8), uniform(30, seed=9), B[:1], 0.8, 0.8),
    "outliers": (C + 1e6 * (uniform(12, 12, seed=10) > 0.9), ones(12), ones(12), 0.8, 0.8),
    "negative costs": (C - 0.5, ones(12), ones(12), 0.8, 0.8),
    "unequal masses": (C, 10 ** (4 * A - 2), 10 ** (4 * B - 2), 0.8, 0.8),
    "at the threshold": (1.6 + 0.01 * (C - 0.5), ones(12), ones(12), 0.8, 0.8),
    "large numbers": (1e5 * C, 1e5 * A, 1e5 * B, 0.8, 0.8),
    "points on a line, fewer columns": (LINE[:, :15], ones(40), ones(15), 0.8, 0.8),
    "points on a line": (LINE, ones(40), ones(40), 0.8, 0.8),
}
# Relative gap that 20 Sinkhorn iterations leave: 1e-2, except where the optimal value is near zero beside its terms.
COARSE = {"points on a line": 0.5, "large τ": 0.05}


def optimal_value(cost: Tensor, a: Tensor, b: Tensor, tau_a: float, tau_b: float) -> float:
    """The dual problem by cvxpy."""
    f, g = cvxpy.Variable((len(a), 1)), cvxpy.Variable((1, len(b)))
    value = (
        a.numpy() @ f[:, 0] + b.numpy() @ g[0] - cvxpy.sum_squares(f) / (2 * tau_a) - cvxpy.sum_squares(g) / (2 * tau_b)
    )
    feasible = f @ np.ones((1, len(b))) + np.ones((len(a), 1)) @ g <= cost.numpy()
    problem = cvxpy.Problem(cvxpy.Maximize(value), [feasible])
    problem.solve(solver="CLARABEL")
    return float(problem.value)


def primal(plan: Tensor, cost: Tensor, a: Tensor, b: Tensor, tau_a: float, tau_b: float) -> Tensor:
    off_a, off_b = plan.sum(-1) - a, plan.sum(-2) - b
    return (cost * plan).sum((-1, -2)) + tau_a / 2 * (off_a**2).sum(-1) + tau_b / 2 * (off_b**2).sum(-1)


def dual(f: Tensor, g: Tensor, a: Tensor, b: Tensor, tau_a: float, tau_b: float) -> Tensor:
    return (f * a - f**2 / (2 * tau_a)).sum(-1) + (g * b - g**2 / (2 * tau_b)).sum(-1)


def certificate_holds(result: Plan, instance: Instance, rounding: float) -> None:
    """Recompute every claim in float64; `rounding` is relative to the largest number at play."""
    cost, a, b, tau_a, tau_b = instance
    plan, f, g = (x.double() for x in (result.plan, result.f, result.g))
    size = max(cost.abs().clamp(max=10 * float(f.abs().max() + g.abs().max()) + 1).max(), f.abs().max()).item()
    assert (plan >= 0).all()
    assert (f[..., :, None] + g[..., None, :] <= cost + rounding * size).all(), "dual point is not feasible"
    nothing = (tau_a / 2 * (a**2).sum(-1) + tau_b / 2 * (b**2).sum(-1)).max().item()
    close = {"rtol": 1e2 * rounding, "atol": 1e2 * rounding * nothing}
    torch.testing.assert_close(result.primal.double(), primal(plan, cost, a, b, tau_a, tau_b), **close)
    torch.testing.assert_close(result.dual.double(), dual(f, g, a, b, tau_a, tau_b), **close)
    assert (result.gap >= 0).all()
    assert (result.primal >= result.dual).all()
    torch.testing.assert_close(result.mass.double(), plan.sum((-1, -2)), rtol=1e-5, atol=1e-12)


@pytest.mark.parametrize("name", INSTANCES)
def test_exact_solver_agrees_with_cvxpy(name: str) -> None:
    instance = INSTANCES[name]
    result = solve(*instance, solver="exact")
    assert result.gap <= 1e-8
    certificate_holds(result, instance, rounding=1e-13)
    assert result.primal.item() == pytest.approx(optimal_value(*instance), rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("name", INSTANCES)
@pytest.mark.parametrize("solver", ["sinkhorn", "fast"])
def test_sinkhorn_is_near_the_optimum(name: str, solver: str) -> None:
    cost, a, b, tau_a, tau_b = INSTANCES[name]
    result = solve(cost.float(), a, b, tau_a, tau_b, solver=solver)
    assert all(getattr(result, field).dtype == torch.float32 for field in Plan.__dataclass_fields__)
    certificate_holds(result, INSTANCES[name], rounding=1e-6)
    optimum = solve(*INSTANCES[name], solver="exact")
    slowness = 1 if solver == "sinkhorn" else 4
    assert result.gap <= slowness * COARSE.get(name, 1e-2)
    assert result.dual <= optimum.primal + 1e-5 * optimum.primal.abs() + 1e-7
    assert result.primal >= optimum.dual - 1e-5 * optimum.dual.abs() - 1e-7


@pytest.mark.parametrize("seed", range(3))
def test_agrees_with_pot(seed: int) -> None:
    """POT minimises the same objective (its l2 divergence is half the squared norm) by multiplicative steps."""
    cost, a, b = uniform(15, 10, seed=seed), uniform(15, seed=seed + 50), uniform(10, seed=seed + 99)
    theirs, log = ot.unbalanced.mm_unbalanced(
        a.numpy(), b.numpy(), cost.numpy(), (0.7, 1.3), div="l2", numItermax=20_000, log=True
    )
    ours = solve(cost, a, b, 0.7, 1.3, solver="exact")
    assert ours.primal.item() == pytest.approx(log["total_cost"], rel=1e-5)
    assert ours.primal.item() <= log["total_cost"] + 1e-9
    for axis in (0, 1):  # the marginals are unique; plans differ while POT's steps have not quite converged
        np.testing.assert_allclose(ours.plan.numpy().sum(axis), theirs.sum(axis), atol=1e-3)


@pytest.mark.parametrize("solver", ["sinkhorn", "fast", "exact"])
def test_two_points_by_hand(solver: str) -> None:
    """One row, one column: r = (τ_a a + τ_b b − c)/(τ_a + τ_b)."""
    result = solve(torch.tensor([[0.5]]), torch.tensor([1.0]), torch.tensor([2.0]), 0.5, 1.5, solver=solver)
    assert result.plan.item() == pytest.approx((0.5 + 3.0 - 0.5) / 2.0, rel=1e-5)


@pytest.mark.parametrize("solver", ["sinkhorn", "fast", "exact"])
def test_costs_above_the_threshold_carry_exactly_nothing(solver: str) -> None:
    result = solve(1.6 + C, ones(12), ones(12), 0.8, 0.8, solver=solver)
    assert result.mass == 0
    assert result.gap <= 1e-6


@pytest.mark.parametrize("solver", ["sinkhorn", "fast", "exact"])
def test_gradient_of_the_value_is_the_plan(solver: str) -> None:
    """∂P*/∂C = π*: a finite difference of the exact value along a random direction."""
    cost, direction = uniform(9, 11, seed=20), uniform(9, 11, seed=21) - 0.5
    a, b = ones(9), ones(11)
    plan = solve(cost, a, b, 0.8, 0.8, solver=solver).plan
    up, down = (solve(cost + h * direction, a, b, 0.8, 0.8, solver="exact").primal for h in (1e-5, -1e-5))
    tolerance = {"exact": 1e-5, "sinkhorn": 0.02, "fast": 0.05}[solver]
    slope = ((up - down) / 2e-5).item()
    assert abs((plan.double() * direction).sum().item() - slope) <= tolerance * plan.sum().item() * 0.5


sizes = st.integers(1, 9)
penalties = st.floats(1e-3, 1e3)
problems = st.tuples(sizes, sizes, penalties, penalties, st.integers(0, 2**31), st.sampled_from([0.0, 0.1, 1.0, 10.0]))


def draw(problem: tuple[int, int, float, float, int, float], views: int = 3) -> Instance:
    n, m, tau_a, tau_b, seed, scale = problem
    cost = scale * uniform(views, n, m, seed=seed)
    a, b = (2 * uniform(k, seed=seed + i) - 0.3 for i, k in ((1, n), (2, m)))
    return cost, a.clamp(min=0), b.clamp(min=0), tau_a, tau_b


@settings(max_examples=60, derandomize=True, database=None)
@given(problems)
def test_exact_certificate_for_any_problem(problem: tuple[int, int, float, float, int, float]) -> None:
    instance = draw(problem)
    result = solve(*instance, solver="exact")
    certificate_holds(result, instance, rounding=1e-12)
    assert (result.gap <= 1e-8).all()


@settings(max_examples=60, derandomize=True, database=None)
@given(problems, st.sampled_from(["sinkhorn", "fast"]))
def test_sinkhorn_certificate_for_any_problem(problem: tuple[int, int, float, float, int, float], solver: str) -> None:
    instance = draw(problem)
    cost, a, b, tau_a, tau_b = instance
    result = solve(cost.float(), a, b, tau_a, tau_b, solver=solver)
    certificate_holds(result, instance, rounding=1e-5)
    nothing = (tau_a * (a**2).sum() + tau_b * (b**2).sum()) / 2
    assert (result.primal <= nothing * (1 + 1e-5)).all(), "worse than moving nothing"


@settings(max_examples=25, derandomize=True, database=None)
@given(problems, st.sampled_from(["sinkhorn", "fast", "exact"]))
def test_a_batch_equals_its_problems_one_by_one(
    problem: tuple[int, int, float, float, int, float], solver: str
) -> None:
    cost, a, b, tau_a, tau_b = draw(problem)
    masses = torch.stack([a, a / 2, 0 * a])
    together = solve(cost, masses, b, tau_a, tau_b, solver=solver)
    alone = [solve(cost[v], masses[v], b, tau_a, tau_b, solver=solver) for v in range(3)]
    for field in ("plan", "primal", "mass"):
        one_by_one = torch.stack([getattr(x, field) for x in alone])
        torch.testing.assert_close(getattr(together, field), one_by_one, rtol=1e-5, atol=1e-7)


def test_any_number_of_leading_axes() -> None:
    cost = uniform(2, 3, 4, 5, seed=30)
    result = solve(cost, ones(4), ones(5), 0.8, 0.8)
    assert result.plan.shape == (2, 3, 4, 5)
    assert result.primal.shape == result.gap.shape == result.mass.shape == (2, 3)
    assert result.f.shape == (2, 3, 4)
    assert result.g.shape == (2, 3, 5)


@pytest.mark.parametrize("solver", ["sinkhorn", "fast"])
def test_sinkhorn_never_looks_at_values(solver: str) -> None:
    """Fake tensors have no values: reading one, as a captured graph cannot, would raise here."""
    with FakeTensorMode():
        result = solve(torch.rand(2, 7, 5), torch.rand(7), torch.rand(5), 0.8, 0.8, solver=solver)
    assert result.plan.shape == (2, 7, 5)


def test_half_precision_and_autocast_are_solved_in_float32() -> None:
    cost = uniform(6, 6, seed=31).bfloat16()
    plain = solve(cost.float(), ones(6), ones(6), 0.8, 0.8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        result = solve(cost, ones(6), ones(6), 0.8, 0.8)
    assert torch.equal(result.plan, plain.plan)


def test_no_gradient_flows_through_the_plan() -> None:
    result = solve(C.clone().requires_grad_(), A, B, 0.8, 0.8)
    assert not result.plan.requires_grad
    assert not result.primal.requires_grad


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((C[0], A, B, 0.8, 0.8), "shape"),
        ((C[:0], A[:0], B, 0.8, 0.8), "shape"),
        ((C, A[:5], B, 0.8, 0.8), "masses a"),
        ((C, A, B[:5], 0.8, 0.8), "masses b"),
        ((C, A, B, 0.0, 0.8), "tau_a"),
        ((C, A, B, 0.8, float("inf")), "tau_b"),
    ],
)
def test_wrong_requests_are_named(arguments: tuple[Tensor, Tensor, Tensor, float, float], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        solve(*arguments)


def test_unknown_solver_is_named_with_the_known_ones() -> None:
    assert set(solvers) == {"sinkhorn", "fast", "exact"}
    with pytest.raises(UsageError, match=r"'sinkhron'.*sinkhorn"):
        solve(C, A, B, 0.8, 0.8, solver="sinkhron")
