"""The fused Sinkhorn kernel against the portable solver, and when `solve` takes it.

Tests of the kernel itself need Triton and a GPU, or Triton's interpreter: TRITON_INTERPRET=1 in the environment.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

from conftest import DEVICE
from fedu2 import kernels
from fedu2.kernels import fused, why_not
from fedu2.regularizers import transport
from fedu2.regularizers.transport import Plan, Schedule, fits, solve, solvers

Kernel = Callable[..., Plan]


@pytest.fixture
def kernel(needs_kernels: None) -> Kernel:
    """The kernel under the signature of `solve`."""
    from fedu2.regularizers.sinkhorn_kernel import launch

    def run(cost: Tensor, a: Tensor, b: Tensor, tau_a: float, tau_b: float, solver: str = "sinkhorn") -> Plan:
        schedule = solvers[solver].schedule
        assert schedule is not None
        plan, f, g, values = launch(cost, a, b, tau_a, tau_b, **asdict(schedule))
        return Plan(plan, f, g, *values.unbind())

    return run


def numbers(*shape: int, seed: int) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def batch(kind: str, n: int, m: int, views: int = 2, d: int = 64) -> Tensor:
    """Cosine distances between points of that kind and random ones, (views, n, m)."""
    generator = torch.Generator().manual_seed(n + m)

    def directions(*shape: int) -> Tensor:
        return normalize(torch.randn(views, *shape, d, generator=generator), dim=-1)

    points, references, centres = directions(n), directions(m), directions(4)
    z = {
        "spread": points,
        "clustered": centres[:, torch.arange(n) % 4] + 0.05 * points,
        "collapsed": centres[:, :1] + 0.01 * points,
    }[kind]
    mean = (z := normalize(z, dim=-1)).mean(-2, keepdim=True)
    return (1 - mean @ references.mT - (z - mean) @ references.mT).to(DEVICE)


def agree(ours: Plan, theirs: Plan) -> None:
    """To what rounding leaves of the iteration: exponents reach 1e4, so a weight is known to 1e-3; sums are better."""
    potentials = torch.cat([theirs.f, theirs.g], -1).abs().max().item()
    close = torch.testing.assert_close
    close(ours.plan, theirs.plan, rtol=0, atol=5e-3 * theirs.plan.max().item() + 1e-12)
    for name in ("f", "g"):
        close(getattr(ours, name), getattr(theirs, name), rtol=0, atol=1e-5 * potentials + 1e-12)
    for name in ("primal", "dual", "mass"):
        close(getattr(ours, name), getattr(theirs, name), rtol=2e-5, atol=1e-6)
    close(ours.gap, theirs.gap, rtol=2e-2, atol=2e-6)


def certificate_holds(result: Plan, cost: Tensor, a: Tensor, b: Tensor, tau_a: float, tau_b: float) -> None:
    """Feasible, and the gap is what P − D is in float64."""
    plan, f, g, cost, a, b = (x.double() for x in (result.plan, result.f, result.g, cost, a, b))
    size = max(f.abs().max().item(), g.abs().max().item())
    assert (plan >= 0).all()
    assert (f[..., :, None] + g[..., None, :] <= cost + 1e-6 * size + 1e-12).all()
    off_a, off_b = plan.sum(-1) - a, plan.sum(-2) - b
    primal = (cost * plan).sum((-1, -2)) + tau_a / 2 * (off_a**2).sum(-1) + tau_b / 2 * (off_b**2).sum(-1)
    dual = (f * a - f**2 / (2 * tau_a)).sum(-1) + (g * b - g**2 / (2 * tau_b)).sum(-1)
    torch.testing.assert_close(result.primal.double(), primal, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(result.dual.double(), dual, rtol=1e-5, atol=1e-5)
    assert (result.gap >= 0).all()


def portable(*arguments: object, solver: str = "sinkhorn") -> Plan:
    with fused(False):
        return solve(*arguments, solver=solver)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["spread", "clustered", "collapsed"])
@pytest.mark.parametrize(("n", "m"), [(128, 128), (1, 1), (17, 5), (100, 128), (128, 200)])
def test_agrees_with_the_portable_solver(kernel: Kernel, kind: str, n: int, m: int) -> None:
    ones = torch.ones(max(n, m), device=DEVICE)
    arguments = (batch(kind, n, m), ones[:n], ones[:m], 0.8, 0.8)
    result = kernel(*arguments)
    agree(result, portable(*arguments))
    certificate_holds(result, *arguments)


@pytest.mark.parametrize("solver", ["sinkhorn", "fast"])
def test_masses_may_be_vectors_one_for_each_problem(kernel: Kernel, solver: str) -> None:
    cost = numbers(2, 3, 20, 30, seed=1)
    arguments = (cost, numbers(2, 3, 20, seed=2), numbers(3, 30, seed=3), 0.5, 2.0)
    result = kernel(*arguments, solver=solver)
    assert result.plan.shape == (2, 3, 20, 30)
    assert result.f.shape == (2, 3, 20)
    assert result.gap.shape == (2, 3)
    agree(result, portable(*arguments, solver=solver))
    certificate_holds(result, *arguments)


def test_masses_may_bring_the_leading_axes(kernel: Kernel) -> None:
    arguments = (numbers(6, 7, seed=1).mT, numbers(3, 7, seed=2), numbers(6, seed=3), 0.8, 0.8)
    agree(kernel(*arguments), portable(*arguments))


@pytest.mark.parametrize("seed", range(24))
def test_as_good_where_potentials_jump(kernel: Kernel, seed: int) -> None:
    """Separable costs, tiny differences, outliers, masses and penalties of many sizes: temperatures are tiny there."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.rand(shape, generator=generator)

    n, m = (int(x) for x in torch.randint(1, 40, (2,), generator=generator))
    noise = [0, 1e-7, 1e-5, 1e-3, 1e-1, 1][seed % 6]
    cost = random(1, 1) + (random(n, 1) + random(1, m)) * (seed % 4 > 0) + noise * random(n, m)
    cost += 100 * (random(n, m) > 0.95) * (seed % 5 == 0)
    a = 10 ** (4 * random(n) - 2) if seed % 3 == 0 else (2 * random(n) - 0.3).clamp(min=0)
    b = (2 * random(m) - 0.3).clamp(min=0)
    tau_a, tau_b = (10 ** (4 * random(2) - 2)).tolist()
    arguments = (cost.to(DEVICE), a.to(DEVICE), b.to(DEVICE), tau_a, tau_b)
    assert kernel(*arguments).gap <= 1.5 * portable(*arguments).gap + 2e-5


@pytest.mark.parametrize("scale", [0.0, 1e-6, 1e5])
def test_any_scale(kernel: Kernel, scale: float) -> None:
    arguments = (scale * numbers(9, 12, seed=1), scale * numbers(9, seed=2), scale * numbers(12, seed=3), 0.8, 0.8)
    result, expected = kernel(*arguments), portable(*arguments)
    torch.testing.assert_close(result.primal, expected.primal, rtol=1e-4, atol=0)
    assert result.gap <= 1.1 * expected.gap + 1e-5


def test_costs_above_the_threshold_carry_exactly_nothing(kernel: Kernel) -> None:
    ones = torch.ones(12, device=DEVICE)
    assert kernel(1.6 + numbers(12, 12, seed=1), ones, ones, 0.8, 0.8).mass == 0


@pytest.mark.usefixtures("needs_gpu")
def test_solve_takes_the_kernel_and_can_be_captured(kernel: Kernel) -> None:
    cost, ones = batch("spread", 128, 128), torch.ones(128, device=DEVICE)
    expected = solve(cost, ones, ones, 0.8, 0.8)  # compiles before the capture
    assert torch.equal(expected.plan, kernel(cost, ones, ones, 0.8, 0.8).plan)
    graph, fixed = torch.cuda.CUDAGraph(), torch.rand_like(cost)
    with torch.cuda.graph(graph):
        captured = solve(fixed, ones, ones, 0.8, 0.8)
    fixed.copy_(cost)
    graph.replay()
    for field in Plan.__dataclass_fields__:
        assert torch.equal(getattr(captured, field), getattr(expected, field))


@pytest.mark.parametrize(
    ("solver", "shape", "dtype", "taken"),
    [
        ("sinkhorn", (2, 7, 5), torch.float32, True),
        ("fast", (7, 5), torch.bfloat16, True),
        ("fast", (7, 5), torch.float64, False),
        ("exact", (7, 5), torch.float32, False),
        ("sinkhorn", (129, 256), torch.float32, False),
    ],
)
def test_solve_takes_the_kernel_where_it_fits(
    monkeypatch: pytest.MonkeyPatch, solver: str, shape: tuple[int, ...], dtype: torch.dtype, taken: bool
) -> None:
    calls: list[Schedule] = []

    def recorded(cost: Tensor, a: Tensor, b: Tensor, tau_a: float, tau_b: float, schedule: Schedule) -> Plan:
        assert cost.dtype == a.dtype == b.dtype == torch.float32
        calls.append(schedule)
        return Plan(*(cost for _ in range(7)))

    monkeypatch.setattr(transport, "by_kernel", recorded)
    monkeypatch.setattr(kernels, "why_not", lambda device: None)
    arguments = (torch.rand(shape).to(dtype), torch.ones(shape[-2]), torch.ones(shape[-1]), 0.8, 0.8)
    solve(*arguments, solver=solver)
    assert calls == ([solvers[solver].schedule] if taken else [])
    with fused(False):
        solve(*arguments, solver=solver)
        with fused(True):
            solve(*arguments, solver=solver)
        solve(*arguments, solver=solver)
    assert len(calls) == (2 if taken else 0)


def test_without_a_gpu_the_portable_path_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "by_kernel", None)  # calling it would raise
    cost = torch.rand(6, 6)
    assert solve(cost, torch.ones(6), torch.ones(6), 0.8, 0.8).plan.shape == (6, 6)
    assert why_not(cost.device) == "no CUDA device"


def test_largest_problems() -> None:
    assert fits(128, 128)
    assert fits(128, 200)
    assert fits(32, 1024)
    assert not fits(129, 129)
    assert not fits(1, 1025)
