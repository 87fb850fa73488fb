from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from fedu2.experiment import Experiment
from fedu2.models import build_encoder
from fedu2.objectives import BYOL, SimCLR, SimSiam, nt_xent, objectives
from fedu2.objectives.byol import momentum_at
from fedu2.options import BYOLOptions


def _build(name: str, **options: object):
    return objectives[name](build_encoder("tiny", 4), Experiment.parse(options))


def _views(n: int = 6) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(n, 3, 16, 16), torch.randn(n, 3, 16, 16)


@given(n=st.integers(2, 7), d=st.integers(1, 5), temperature=st.floats(0.05, 2.0), seed=st.integers(0, 99))
def test_nt_xent_against_a_loop(n: int, d: int, temperature: float, seed: int) -> None:
    z = torch.randn(2 * n, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    unit = F.normalize(z, dim=1)
    total = 0.0
    for i in range(2 * n):
        partner = (i + n) % (2 * n)
        others = [math.exp(float(unit[i] @ unit[k]) / temperature) for k in range(2 * n) if k != i]
        total -= float(unit[i] @ unit[partner]) / temperature - math.log(sum(others))
    assert nt_xent(z[:n], z[n:], temperature).item() == pytest.approx(total / (2 * n), rel=1e-4, abs=1e-5)


def test_nt_xent_by_hand() -> None:
    # z1 = (e1, e2), z2 = z1, τ = 1: each view has its partner at similarity 1 and two others at 0.
    z = torch.eye(2)
    assert nt_xent(z, z, 1.0).item() == pytest.approx(-math.log(math.e / (math.e + 2)), abs=1e-6)


def test_simsiam_loss_and_stop_gradient() -> None:
    torch.manual_seed(0)
    learner = _build("simsiam")
    x1, x2 = _views()
    outcome = learner(x1, x2)
    z1, z2 = outcome.projections
    learner.eval()  # predictor statistics do not matter below: recompute with the same mode as forward
    learner.train()
    p1, p2 = learner.predictor(z1), learner.predictor(z2)
    expected = -(F.cosine_similarity(p1, z2).mean() + F.cosine_similarity(p2, z1).mean()) / 2
    assert torch.allclose(outcome.loss, expected)
    # With the predictor cut off, only the detached branch is left, and no gradient may flow through it.
    frozen = SimSiam(build_encoder("tiny", 4), Experiment())
    frozen.predictor.requires_grad_(False)
    assert not torch.equal(frozen(x1, x2).loss.detach(), torch.tensor(0.0))
    (gradient,) = torch.autograd.grad(frozen(x1, x2).loss, frozen.encoder.stem[0].weight)
    assert gradient.abs().sum() > 0


def test_byol_loss_is_between_zero_and_eight_and_uses_the_target() -> None:
    torch.manual_seed(0)
    learner = _build("byol")
    x1, x2 = _views()
    outcome = learner(x1, x2)
    p1, p2 = (learner.predictor(z) for z in outcome.projections)
    t1, t2 = learner.target(x1), learner.target(x2)
    expected = (2 - 2 * F.cosine_similarity(p1, t2)).mean() + (2 - 2 * F.cosine_similarity(p2, t1)).mean()
    assert torch.allclose(outcome.loss, expected, atol=1e-5)
    assert 0 <= outcome.loss.item() <= 8
    outcome.loss.backward()
    assert all(p.grad is None for p in learner.target.parameters())
    assert all(p.grad is not None for p in learner.encoder.parameters())


def test_byol_target_follows_by_the_formula() -> None:
    torch.manual_seed(0)
    learner = _build("byol", **{"byol.momentum": 0.9})
    before = [p.clone() for p in learner.target.parameters()]
    with torch.no_grad():
        for p in learner.encoder.parameters():
            p.add_(1.0)
    learner.after_step(0.5)
    online = [*learner.encoder.parameters(), *learner.projector.parameters()]
    for old, target, now in zip(before, learner.target.parameters(), online, strict=True):
        assert torch.allclose(target, 0.9 * old + 0.1 * now, atol=1e-6)


def test_byol_start_makes_the_target_equal_to_the_online_network() -> None:
    learner = _build("byol")
    learner(*_views())  # moves the running statistics of both networks alike
    learner.projector(learner.encoder(_views()[0]))  # and those of the online network once more
    with torch.no_grad():
        learner.encoder.stem[0].weight.add_(1.0)
    learner.start()
    x = torch.randn(3, 3, 16, 16)
    learner.eval()
    assert torch.equal(learner.target(x), learner.projector(learner.encoder(x)))


def test_byol_momentum_schedule() -> None:
    constant, cosine = BYOLOptions(momentum=0.9), BYOLOptions(momentum=0.9, momentum_schedule="cosine")
    assert momentum_at(constant, 0.7) == 0.9
    assert momentum_at(cosine, 0.0) == pytest.approx(0.9)
    assert momentum_at(cosine, 0.5) == pytest.approx(0.95)
    assert momentum_at(cosine, 1.0) == pytest.approx(1.0)


@pytest.mark.parametrize("name", ["simclr", "simsiam", "byol"])
def test_every_objective_shows_its_representations(name: str) -> None:
    learner = _build(name, **{"heads.hidden": 12, "heads.out": 5})
    outcome = learner(*_views())
    assert isinstance(learner, SimCLR | SimSiam | BYOL)
    assert all(h.shape == (6, learner.encoder.features) for h in outcome.features)
    assert all(z.shape == (6, 5) and z.requires_grad for z in outcome.projections)
    assert outcome.loss.shape == ()


def test_heads_default_to_the_papers_proportions() -> None:
    learner = objectives["byol"](build_encoder("resnet18"), Experiment())
    assert [learner.projector[0].in_features, learner.projector[0].out_features] == [512, 2048]
    assert [learner.predictor[0].in_features, learner.predictor[3].out_features] == [512, 512]
