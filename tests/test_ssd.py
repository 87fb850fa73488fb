"""SSD: whose dimensions are whose, both forms of its two terms against loops, and what a client is told and keeps."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fedu2
from fedu2.data import load_dataset
from fedu2.errors import UsageError
from fedu2.experiment import Experiment
from fedu2.federation.callbacks import Callback
from fedu2.federation.local import LocalBackend
from fedu2.federation.rounds import initial_state
from fedu2.methods import Batch, Method, Task, build, plain_fedavg, resolve
from fedu2.methods.ssd import distillation, scale_vector, separation
from fedu2.models.flat import FlatModel
from fedu2.objectives.alignuniform import on_sphere, uniformity
from fedu2.options import SSDOptions

FORMS = ["paper", "code"]


def _noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _units(*shape: int, seed: int = 0) -> Tensor:
    return F.normalize(_noise(*shape, seed=seed), dim=-1)


def _method(micro: Experiment, *settings: str) -> Method:
    return build(resolve(Experiment.parse(micro.flat(), ["method=ssd", *settings])))


def _weights(path: Path) -> bytes:
    newest = max((path / "checkpoint").glob("round-*"))
    return b"".join(file.read_bytes() for file in sorted(newest.glob("*.safetensors")))


@pytest.mark.parametrize(("d", "clients"), [(512, 10), (512, 50), (512, 1), (16, 5), (16, 16), (11, 3)])
def test_dimensions_are_disjoint_and_as_many_as_fit(d: int, clients: int) -> None:
    scales = torch.stack([scale_vector(d, clients, client, 10.0) for client in range(clients)])
    own = scales == 10
    assert bool((own | (scales == 1)).all())
    assert own.sum(1).tolist() == [d // clients] * clients
    assert own.sum(0).max() == 1


def test_more_clients_than_dimensions_take_turns() -> None:
    own = [scale_vector(3, 7, client, 4.0).tolist() for client in range(7)]
    assert own[:3] == [[4, 1, 1], [1, 4, 1], [1, 1, 4]]
    assert own[3:6] == own[:3]
    assert own[6] == own[0]


def _separation_in_a_loop(u: Tensor, scale: Tensor, form: str) -> float:
    views = []
    for view in u.tolist():
        targets = [[value * s for value, s in zip(row, scale.tolist(), strict=True)] for row in view]
        if form == "code":
            targets = [[value / math.hypot(*row) for value in row] for row in targets]
        squares = [sum((a - b) ** 2 for a, b in zip(*rows, strict=True)) for rows in zip(view, targets, strict=True)]
        views.append(sum(squares) / len(view) if form == "paper" else math.sqrt(sum(squares)) / len(view))
    return sum(views) / len(views)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("n", "d", "clients"), [(2, 6, 3), (5, 8, 2), (9, 7, 3)])
def test_separation_against_a_loop(n: int, d: int, clients: int, form: str) -> None:
    u, scale = _units(2, n, d), scale_vector(d, clients, 1, 10.0).double()
    expected = _separation_in_a_loop(u, scale, form)
    assert separation(u, scale, SSDOptions(form=form)).item() == pytest.approx(expected, rel=1e-6)


def test_separation_by_hand() -> None:
    u, scale = torch.tensor([[[0.6, 0.8], [0.0, 1.0]]]), torch.tensor([10.0, 1.0])
    assert separation(u, scale, SSDOptions(form="paper")).item() == pytest.approx(81 * 0.36 / 2)  # (α − 1)² · own share
    # (6, 0.8) at length 1 is (0.9912, 0.1322); the other image is where it should be.
    length = math.hypot(6, 0.8)
    expected = math.hypot(0.6 - 6 / length, 0.8 - 0.8 / length) / 2
    assert separation(u, scale, SSDOptions(form="code")).item() == pytest.approx(expected)


def test_separation_of_a_single_client_is_nothing() -> None:
    """All dimensions are its own: stretched and brought back they are where they were, and rounding has no say."""
    z = torch.randn(2, 64, 32, generator=torch.Generator().manual_seed(0)).requires_grad_()
    loss = separation(on_sphere(z), scale_vector(32, 1, 0, 10.0), SSDOptions(form="code"))
    loss.backward()
    assert 0 <= loss.item() < 1e-5
    assert z.grad.norm() < 1e-5


@pytest.mark.parametrize("form", FORMS)
def test_the_target_of_separation_is_a_constant(form: str) -> None:
    u, scale = _units(2, 3, 6).requires_grad_(), scale_vector(6, 3, 1, 10.0).double()
    (gradient,) = torch.autograd.grad(separation(u, scale, SSDOptions(form=form)), u)
    free = u.detach()
    if form == "paper":
        expected = 2 * (free - free * scale) / (2 * 3)
    else:
        apart = free - F.normalize(free * scale, dim=-1)
        expected = apart / apart.norm(dim=(1, 2), keepdim=True) / (2 * 3)
    torch.testing.assert_close(gradient, expected, check_dtype=False, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("form", FORMS)
def test_separation_stretches_own_dimensions(form: str) -> None:
    z, scale, own = _noise(1, 8, 6).float(), scale_vector(6, 3, 1, 10.0), slice(2, 4)

    def share(z: Tensor) -> Tensor:
        return z[..., own].square().sum(-1) / z.square().sum(-1)

    before = share(z)
    for _ in range(20):
        z.requires_grad_()
        (gradient,) = torch.autograd.grad(separation(F.normalize(z, dim=-1), scale, SSDOptions(form=form)), z)
        z = z.detach() - gradient
    assert bool((share(z) > before).all())
    assert share(z).min() > 2 * before.min()


@pytest.mark.parametrize(("form", "least", "most"), [("paper", 0.99, 1.0), ("code", 0.205, 0.3)])
def test_against_uniformity_the_printed_separation_is_hard_and_the_codes_is_soft(
    form: str, least: float, most: float
) -> None:
    """Free points under L_uniform + L_DSR come to rest with all of their length in the own dimensions, or a bit more.

    Five clients: under L_uniform alone the share of the own dimensions is a fifth.
    """
    z, scale = _noise(64, 20).float(), scale_vector(20, 5, 1, 10.0)
    for _ in range(100):
        z = on_sphere(z).requires_grad_()
        u = on_sphere(z)
        loss = uniformity(u, 2.0) + separation(u[None], scale, SSDOptions(form=form))
        z = z.detach() - 3 * torch.autograd.grad(loss, z)[0]
    share = on_sphere(z)[:, scale > 1].square().sum(1).mean().item()
    assert least < share < most + 1e-6


def _divergence_in_a_loop(p: Tensor, q: Tensor) -> Tensor:
    """mean KL(σ(p) ‖ σ(q)) over views and images."""
    total = torch.zeros((), dtype=p.dtype)
    for a, b in zip(p.flatten(0, 1), q.flatten(0, 1), strict=True):
        a, b = a.exp() / a.exp().sum(), b.exp() / b.exp().sum()
        for x, y in zip(a, b, strict=True):
            total = total + x * torch.log(x / y)
    return total / (p.shape[0] * p.shape[1])


@pytest.mark.parametrize("temperature", [0.5, 2.0])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("n", "d"), [(2, 3), (4, 8)])
def test_distillation_and_its_gradients_against_a_loop(n: int, d: int, form: str, temperature: float) -> None:
    h, z = _noise(2, n, d).requires_grad_(), _noise(2, n, d, seed=1).requires_grad_()
    options = SSDOptions(form=form, temperature=temperature)
    expected = (
        _divergence_in_a_loop(h, z.detach())  # whatever the temperature
        if form == "paper"
        else _divergence_in_a_loop(z / temperature, h / temperature)
    )
    loss = distillation(h, z, options)
    assert loss.item() == pytest.approx(expected.item())
    found = torch.autograd.grad(loss, (h, z), allow_unused=True)
    true = torch.autograd.grad(expected, (h, z), allow_unused=True)
    torch.testing.assert_close(found[0], true[0])
    if form == "paper":
        assert found[1] is None  # the teacher learns nothing from its pupil
    else:
        torch.testing.assert_close(found[1], true[1])


def test_distillation_in_the_form_of_the_code_is_torchs_kl_div() -> None:
    h, z = _noise(2, 4, 8), _noise(2, 4, 8, seed=1)
    first, second = (
        F.kl_div(F.log_softmax(h[v] / 0.5, 1), F.softmax(z[v] / 0.5, 1), reduction="batchmean") for v in range(2)
    )
    torch.testing.assert_close(distillation(h, z, SSDOptions(form="code")), (first + second) / 2)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", ["collapsed", "zero", "already there"])
def test_gradients_stay_finite(kind: str, form: str) -> None:
    z = torch.zeros(2, 4, 6) if kind == "zero" else torch.ones(2, 4, 6)
    scale = torch.ones(6) if kind == "already there" else scale_vector(6, 3, 0, 10.0)
    z.requires_grad_()
    options = SSDOptions(form=form)
    loss = separation(F.normalize(z, dim=-1, eps=1e-6), scale, options) + distillation(z * 2, z, options)
    loss.backward()
    assert z.grad is not None
    assert z.grad.isfinite().all()


@pytest.mark.parametrize("form", FORMS)
def test_the_loss_adds_both_terms_for_the_clients_own_dimensions(micro: Experiment, form: str) -> None:
    """Client 1 of 3 with d = 16: dimensions 5 to 9."""
    settings = [f"ssd.form={form}", "ssd.separation=0.5", "ssd.distillation=0.3", "ssd.scale=4", "ssd.temperature=0.7"]
    method = _method(micro, *settings)
    model = FlatModel(method.learner())
    method.receive(model, initial_state(method, "cpu").server, None, Task(1, 1, 1, 0.1, 0.0))
    learner, options = model.module, method.experiment.ssd
    views = torch.randn(2, 6, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    plain = learner(*views)
    total, terms = method.loss(learner, Batch(*views), torch.Generator())
    scale = torch.ones(16)
    scale[5:10] = 4
    apart = _separation_in_a_loop(F.normalize(torch.stack(plain.projections), dim=-1), scale, form)
    taught = distillation(torch.stack(plain.features), torch.stack(plain.projections), options).item()
    assert terms["ssd.separation"].item() == pytest.approx(apart, rel=1e-4)
    assert terms["ssd.distillation"].item() == pytest.approx(taught, rel=1e-4)
    assert terms["align"].item() == pytest.approx(plain.loss.item(), rel=1e-4)
    assert total.item() == pytest.approx(plain.loss.item() + 0.5 * apart + 0.3 * taught, rel=1e-4)
    assert terms["loss"].item() == total.item()


def test_one_lane_holds_each_clients_vector_in_turn_and_keeps_none(micro: Experiment) -> None:
    method = _method(micro)
    data = load_dataset("sample", method.experiment.data)
    shares = [torch.arange(32), torch.arange(32, 64), torch.arange(64, 96)]
    backend = LocalBackend(method, data.train, shares)
    (lane,) = backend.lanes
    held = lane.model.module.get_buffer("separation.scale")
    server = initial_state(method, "cpu").server
    for client in (2, 0, 1, 2):
        task = Task(1, client, 2, 0.05, 0.0)
        (reply,) = backend.run([task], server, {}, Callback())
        assert torch.equal(held, scale_vector(16, 3, client, 10.0))  # in place: a captured step reads this memory
        assert lane.model.module.get_buffer("separation.scale") is held
        assert reply.memory == reply.payload == {}
        assert reply.model.buffers.shape == server.model.buffers.shape
        assert len(reply.model.buffers) == len(lane.model.buffers) - 16  # it does not travel
    assert not any(entry.section == "separation" for layout in method.layouts for entry in layout.entries)


def test_clients_with_the_same_images_learn_different_things(micro: Experiment) -> None:
    """Without any randomness of their own, all that tells two clients apart is d_k."""
    method = _method(micro, "views.recipe=none", "views.crop_scale=null")
    images, share = load_dataset("sample", method.experiment.data).train, torch.arange(2)
    backend = LocalBackend(method, images, [share] * 3)
    server = initial_state(method, "cpu").server

    def step(client: int) -> Tensor:
        (reply,) = backend.run([Task(1, client, 1, 0.05, 0.0)], server, {}, Callback())
        return reply.model.params

    assert (step(0) - step(1)).norm() > 1e-3 * (step(0) - server.model.params).norm()


def test_without_its_terms_it_is_fedalignuniform(micro: Experiment, tmp_path: Path) -> None:
    bare = Experiment.parse(micro.flat(), ["method=ssd", "ssd.separation=0", "ssd.distillation=0", "heads.out=5"])
    plain = Experiment.parse(micro.flat(), ["method=fedalignuniform", "heads.out=5"])
    runs = [fedu2.train(experiment, tmp_path / experiment.method) for experiment in (bare, plain)]
    assert _weights(runs[0].path) == _weights(runs[1].path)
    assert plain_fedavg(resolve(bare)) == resolve(plain.with_(ssd__separation=0, ssd__distillation=0))


def test_projections_of_another_size_cannot_be_distilled(micro: Experiment, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"heads\.out=5 must be 16, or null"):
        fedu2.train(Experiment.parse(micro.flat(), ["method=ssd", "heads.out=5"]), tmp_path / "run")
    _method(micro, "heads.out=16").learner()
    _method(micro, "heads.out=5", "ssd.distillation=0").learner()


def test_both_forms_train_and_log(micro: Experiment, tmp_path: Path) -> None:
    logged = {}
    for form in FORMS:
        run = fedu2.train(Experiment.parse(micro.flat(), ["method=ssd", f"ssd.form={form}"]), tmp_path / form)
        last = logged[form] = run.history[-1]
        parts = last["align"] + last["ssd.separation"] + 0.1 * last["ssd.distillation"]
        assert last["loss"] == pytest.approx(parts, abs=1e-4)
        assert not list((run.path / "checkpoint").rglob("client-*"))
    assert logged["paper"]["ssd.separation"] > 10 * logged["code"]["ssd.separation"]
