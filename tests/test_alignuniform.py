"""Alignment and uniformity: both terms against loops, and where points coincide."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fedu2
from fedu2.experiment import Experiment
from fedu2.models import build_encoder
from fedu2.objectives import objectives
from fedu2.objectives.alignuniform import alignment, on_sphere, uniformity
from fedu2.views import views_for


def _noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _points(n: int, d: int, seed: int = 0) -> Tensor:
    return F.normalize(_noise(n, d, seed=seed), dim=-1)


def _uniformity_in_a_loop(z: Tensor, t: float) -> Tensor:
    pairs = [torch.exp(-t * (z[i] - z[j]).square().sum()) for i in range(len(z)) for j in range(len(z)) if i != j]
    return torch.stack(pairs).mean().log()


def _learner(**options: object):
    torch.manual_seed(0)
    return objectives["alignuniform"](build_encoder("tiny", 4), Experiment.parse(options))


def _views(n: int = 6) -> tuple[Tensor, Tensor]:
    return torch.randn(n, 3, 16, 16), torch.randn(n, 3, 16, 16)


@pytest.mark.parametrize(("n", "d"), [(2, 1), (2, 8), (3, 2), (9, 16)])
def test_alignment_against_a_loop(n: int, d: int) -> None:
    z1, z2 = _points(n, d), _points(n, d, seed=1)
    expected = sum((float(z1[i, j]) - float(z2[i, j])) ** 2 for i in range(n) for j in range(d)) / n
    assert alignment(z1, z2).item() == pytest.approx(expected)


@pytest.mark.parametrize("t", [0.5, 2.0, 5.0])
@pytest.mark.parametrize(("n", "d"), [(2, 1), (2, 8), (3, 2), (9, 16)])
def test_uniformity_and_its_gradient_against_a_loop(n: int, d: int, t: float) -> None:
    z = _points(n, d).requires_grad_()
    expected = _uniformity_in_a_loop(z, t)
    assert uniformity(z, t).item() == pytest.approx(expected.item(), abs=1e-9)
    (gradient,) = torch.autograd.grad(uniformity(z, t), z)
    (true_gradient,) = torch.autograd.grad(expected, z)
    torch.testing.assert_close(gradient, true_gradient, atol=1e-9, rtol=1e-6)


def test_by_hand() -> None:
    opposite = torch.tensor([[1.0, 0.0], [-1.0, 0.0]])
    turned = torch.tensor([[0.0, 1.0], [0.0, 1.0]])
    assert uniformity(opposite, 2.0).item() == pytest.approx(-8)  # one pair, at squared distance 4
    assert uniformity(turned, 2.0).item() == pytest.approx(0, abs=1e-6)
    assert alignment(opposite, turned).item() == pytest.approx(2)
    # Four points on a cross: of 12 ordered pairs 8 are at squared distance 2 and 4 at 4.
    cross = torch.cat([torch.eye(2), -torch.eye(2)])
    assert uniformity(cross, 1.0).item() == pytest.approx(math.log((8 * math.exp(-2) + 4 * math.exp(-4)) / 12))


def test_batches_do_not_mix() -> None:
    views = torch.stack([_points(5, 4), _points(5, 4, seed=1)])
    together = uniformity(views, 2.0)
    assert together.shape == (2,)
    for view, value in zip(views, together, strict=True):
        torch.testing.assert_close(uniformity(view, 2.0), value)


def test_near_points_keep_their_differences() -> None:
    """In float32 ‖a‖² + ‖b‖² − 2⟨a, b⟩ of unit vectors loses all digits of a small distance."""
    z = F.normalize(_points(1, 64) + 1e-4 * _points(16, 64, seed=1), dim=-1).float().requires_grad_()
    exact = z.detach().double().requires_grad_()
    steep = 1e7  # so that squared distances of 1e-8 matter
    found, expected = uniformity(z, steep), _uniformity_in_a_loop(exact, steep)
    assert found.item() == pytest.approx(expected.item(), rel=1e-3)
    (gradient,), (true_gradient,) = torch.autograd.grad(found, z), torch.autograd.grad(expected, exact)
    torch.testing.assert_close(gradient.double(), true_gradient, rtol=1e-2, atol=1e-2 * true_gradient.abs().max())


def test_a_steep_potential_does_not_underflow() -> None:
    z = _points(4, 8)
    nearest = min((z[i] - z[j]).square().sum().item() for i in range(4) for j in range(i))
    assert uniformity(z.float(), 1e4).item() == pytest.approx(-1e4 * nearest + math.log(2 / 12), rel=1e-4)


@pytest.mark.parametrize("n", [2, 6])
def test_the_loss_is_that_of_normalised_projections(n: int) -> None:
    learner = _learner(**{"alignuniform.weight": 0.7, "alignuniform.t": 1.5, "heads.out": 5})
    outcome = learner(*_views(n))
    assert all(z.shape == (n, 5) and z.requires_grad for z in outcome.projections)
    z1, z2 = (F.normalize(z.double(), dim=1) for z in outcome.projections)
    align = (z1 - z2).square().sum(1).mean()
    uniform = (_uniformity_in_a_loop(z1, 1.5) + _uniformity_in_a_loop(z2, 1.5)) / 2
    assert outcome.loss.item() == pytest.approx((align + 0.7 * uniform).item(), abs=1e-5)
    assert outcome.terms["alignuniform.align"].item() == pytest.approx(align.item(), abs=1e-5)
    assert outcome.terms["alignuniform.uniform"].item() == pytest.approx(uniform.item(), abs=1e-5)
    outcome.loss.backward()
    assert all(p.grad is not None for p in learner.parameters())


@pytest.mark.parametrize(("kind", "bound"), [("identical views", 10), ("collapsed", 1), ("zero", 1), ("one zero", 1e7)])
def test_gradients_stay_bounded_where_points_coincide(kind: str, bound: float) -> None:
    z = _noise(2, 4, 8).float()
    if kind == "identical views":
        z[1] = z[0]
    elif kind == "collapsed":
        z[:] = z[0, 0].clone()
    elif kind == "zero":
        z.zero_()
    else:
        z[0, 0] = 0  # without a direction: pulled toward that of the other view, as if it were of length 1e-6
    z.requires_grad_()
    unit = on_sphere(z)
    (alignment(unit[0], unit[1]) + uniformity(unit, 2.0).mean()).backward()
    assert z.grad is not None
    assert z.grad.abs().max() < bound


def test_bfloat16_is_summed_in_float32() -> None:
    z = on_sphere(_noise(16, 32).bfloat16())
    with torch.autocast("cpu", torch.bfloat16):
        rough = uniformity(z, 2.0)
    assert rough.dtype == torch.float32
    assert torch.equal(rough, uniformity(z, 2.0))


def test_descent_spreads_points() -> None:
    z = (_points(1, 8) + 0.1 * _points(16, 8, seed=1)).float()
    for _ in range(50):
        z.requires_grad_()
        (gradient,) = torch.autograd.grad(uniformity(on_sphere(z), 2.0), z)
        z = on_sphere(z.detach() - gradient)
    assert uniformity(z, 2.0) < -2


def test_views_are_those_of_simclr() -> None:
    options = Experiment().views
    assert views_for(options, "alignuniform") == views_for(options, "simclr")


def test_the_method_logs_both_terms_and_remembers_nothing(micro: Experiment, tmp_path: Path) -> None:
    run = fedu2.train(micro.with_(method="fedalignuniform", alignuniform__weight=0.5), tmp_path / "run")
    last = run.history[-1]
    assert run.experiment.aggregator == "fedavg"
    assert last["loss"] == pytest.approx(last["alignuniform.align"] + 0.5 * last["alignuniform.uniform"], abs=1e-5)
    assert last["align"] == last["loss"]
    assert not list((run.path / "checkpoint").rglob("client-*"))
