from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import fedu2
from fedu2.aggregators import aggregators
from fedu2.data import load_dataset, make_partition
from fedu2.experiment import Experiment
from fedu2.federation.callbacks import Callback
from fedu2.federation.local import LocalBackend
from fedu2.federation.rounds import FederationState, initial_state, play_round
from fedu2.methods import Batch, Method, Task, build, resolve
from fedu2.methods.fedx import FedX, relational
from fedu2.models.flat import FlatModel
from fedu2.objectives import Objective, Outcome, nt_xent
from fedu2.options import FedXOptions
from fedu2.views import plain_view

OBJECTIVES = ("simclr", "byol")
TERMS = ("fedx.local", "fedx.global", "fedx.local_relation", "fedx.global_relation")
UNCHANGED = "views.recipe=none", "views.crop_scale=null"  # views are the images themselves


def _with(experiment: Experiment, *settings: str) -> Experiment:
    return resolve(Experiment.parse(experiment.flat(), ["method=fedx", *settings]))


def _batch(n: int, seed: int = 0, size: int = 16) -> Batch:
    noise = torch.Generator().manual_seed(seed)
    return Batch(*torch.randn(3, n, 3, size, size, generator=noise))


def _learner(method: Method) -> Objective:
    """In training, with a teacher and a target network that differ from the online one."""
    learner = method.learner().train()
    noise = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in learner.named_parameters():
            if name.startswith(("teacher", "target")):
                parameter.add_(0.2 * torch.randn(parameter.shape, generator=noise))
    return learner


def _outcome(method: Method, learner: Objective, batch: Batch) -> Outcome:
    return method.outcome(learner, batch, torch.Generator())


# The terms, one image after the other.


def _cosine(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).sum() / (a.norm() * b.norm())


def _relation(a: Tensor, others: Tensor, temperature: float) -> list[Tensor]:
    weights = [(_cosine(a, b) / temperature).exp() for b in others]
    return [weight / sum(weights) for weight in weights]


def _slow_relational(a1: Tensor, a2: Tensor, others: Tensor, options: FedXOptions) -> Tensor:
    total = torch.zeros((), dtype=a1.dtype)
    for first, second in zip(a1, a2, strict=True):
        aims = [_relation(a, others, options.target_temperature) for a in (first, second)]
        target = [(s1 + s2) / 2 for s1, s2 in zip(*aims, strict=True)]
        for a in (first, second):
            for t, r in zip(target, _relation(a, others, options.temperature), strict=True):
                p, q = (r, t) if options.divergence == "js" else (t, r)
                total = total + p * (p / q).log() / 2
    return total / len(a1)


def _slow_contrast(a: Tensor, b: Tensor, temperature: float) -> Tensor:
    everything, n = [*a, *b], len(a)
    total = torch.zeros((), dtype=a.dtype)
    for i, one in enumerate(everything):
        weights = [(_cosine(one, other) / temperature).exp() for other in everything]
        total = total - (weights[(i + n) % (2 * n)] / sum(w for k, w in enumerate(weights) if k != i)).log()
    return total / (2 * n)


@pytest.mark.parametrize("divergence", ["toward_mean", "js"])
@pytest.mark.parametrize(("tau", "tau2"), [(0.1, 0.1), (0.5, 0.2), (0.3, 1.5)])
@pytest.mark.parametrize(("n", "m", "d"), [(1, 3, 2), (2, 2, 5), (6, 4, 3)])
def test_relations_against_a_loop(divergence: str, tau: float, tau2: float, n: int, m: int, d: int) -> None:
    options = FedXOptions(temperature=tau, target_temperature=tau2, divergence=divergence)
    noise = torch.Generator().manual_seed(n)
    shapes = (n, d), (n, d), (m, d)
    given = [torch.randn(shape, generator=noise, dtype=torch.float64, requires_grad=True) for shape in shapes]
    fast, slow = relational(*given, options), _slow_relational(*given, options)
    assert fast.item() == pytest.approx(slow.item(), rel=1e-4, abs=1e-6)
    # Everything has a gradient, the mean of the relations included: nothing is detached.
    for mine, theirs in zip(torch.autograd.grad(fast, given), torch.autograd.grad(slow, given), strict=True):
        assert torch.allclose(mine, theirs, rtol=1e-3, atol=1e-5)


def test_relations_of_several_problems_at_once() -> None:
    a1, a2, others = torch.randn(3, 2, 4, 5, generator=torch.Generator().manual_seed(0))
    options = FedXOptions()
    alone = torch.stack([relational(a1[k], a2[k], others[k], options) for k in range(2)])
    assert torch.allclose(relational(a1, a2, others, options), alone, atol=1e-6)


def test_relations_by_hand() -> None:
    # Two axes seen from both ends: r_1 = (e, 1)/(e + 1), r_2 the other way round, t = (½, ½).
    axes, r = torch.eye(2), math.e / (math.e + 1)
    at_one = {"temperature": 1.0, "target_temperature": 1.0}
    toward_mean = relational(axes, axes.flip(0), axes, FedXOptions(**at_one))
    js = relational(axes, axes.flip(0), axes, FedXOptions(**at_one, divergence="js"))
    assert toward_mean.item() == pytest.approx(-math.log(4 * r * (1 - r)) / 2, abs=1e-6)
    assert js.item() == pytest.approx(math.log(2) + r * math.log(r) + (1 - r) * math.log(1 - r), abs=1e-6)


@pytest.mark.parametrize("divergence", ["toward_mean", "js"])
def test_views_with_the_same_relations_cost_nothing_unless_the_target_is_sharper(divergence: str) -> None:
    a, others = torch.randn(2, 4, 3, generator=torch.Generator().manual_seed(0))
    same = relational(a, 3 * a, others, FedXOptions(divergence=divergence))
    sharper = relational(a, 3 * a, others, FedXOptions(divergence=divergence, target_temperature=0.05))
    assert same.item() == pytest.approx(0, abs=1e-6)
    assert sharper.item() > 1e-3


@pytest.mark.parametrize("divergence", ["toward_mean", "js"])
def test_relations_that_round_to_zero_stay_finite(divergence: str) -> None:
    options = FedXOptions(temperature=0.01, target_temperature=0.001, divergence=divergence)
    given = [torch.randn(4, 3, requires_grad=True) for _ in range(3)]
    loss = relational(*given, options)
    assert math.isfinite(loss.item())
    assert all(gradient.isfinite().all() for gradient in torch.autograd.grad(loss, given))


# One step of a learner.


@pytest.mark.parametrize("divergence", ["toward_mean", "js"])
@pytest.mark.parametrize("n", [2, 5])
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_the_four_terms_against_loops(micro: Experiment, objective: str, n: int, divergence: str) -> None:
    settings = f"objective={objective}", "fedx.temperature=0.3", "fedx.target_temperature=0.2"
    method = build(_with(micro, *settings, f"fedx.divergence={divergence}"))
    learner, batch, options = _learner(method), _batch(n), method.experiment.fedx
    outcome = _outcome(method, learner, batch)

    z1, z2, z_r = (learner.projector(learner.encoder(x)).double() for x in (batch.view1, batch.view2, batch.other))
    p1, p2 = (learner.predictor(z.float()).double() for z in (z1, z2))
    g2, g_r = (learner.teacher(x).double() for x in (batch.view2, batch.other))
    own = learner(batch.view1, batch.view2).loss if objective == "byol" else _slow_contrast(z1, z2, 0.3)
    slow = {
        "fedx.local": own,
        "fedx.global": _slow_contrast(p1, g2, 0.3),
        "fedx.local_relation": _slow_relational(z1, z2, z_r, options),
        "fedx.global_relation": _slow_relational(p1, p2, g_r, options),
    }
    assert tuple(outcome.terms) == TERMS
    for name, expected in slow.items():
        assert outcome.terms[name].item() == pytest.approx(expected.item(), rel=1e-3, abs=1e-5), name
    assert outcome.loss.item() == pytest.approx(sum(term.item() for term in slow.values()), rel=1e-3)
    assert torch.allclose(outcome.projections[1].double(), z2, atol=1e-5)
    assert outcome.predictions is not None
    assert torch.allclose(outcome.predictions[0].double(), p1, atol=1e-5)


def test_the_local_contrast_takes_fedx_temperature_and_not_that_of_simclr(micro: Experiment) -> None:
    batch = _batch(6)

    def local(*settings: str) -> tuple[float, Outcome]:
        method = build(_with(micro, "objective=simclr", *settings))
        outcome = _outcome(method, _learner(method), batch)
        return outcome.terms["fedx.local"].item(), outcome

    usual, outcome = local()
    assert usual == pytest.approx(nt_xent(*outcome.projections, 0.1).item(), rel=1e-5)
    assert local("simclr.temperature=0.9")[0] == usual
    assert abs(local("fedx.temperature=0.9")[0] - usual) > 0.01


def test_losses_are_exact_under_autocast(micro: Experiment) -> None:
    """Cosines in bfloat16 would be off by up to 2⁻⁹ each, forty times what is allowed here after a division by τ."""
    method = build(_with(micro, "objective=simclr"))
    with torch.autocast("cpu", torch.bfloat16):
        outcome = _outcome(method, _learner(method), _batch(6))
    assert outcome.projections[0].dtype == torch.bfloat16
    exact = nt_xent(*outcome.projections, 0.1).item()
    assert outcome.terms["fedx.local"].item() == pytest.approx(exact, rel=1e-5)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_gradients_reach_everything_local_and_nothing_of_the_teacher(micro: Experiment, objective: str) -> None:
    method = build(_with(micro, f"objective={objective}"))
    learner, batch = _learner(method), _batch(6)
    frozen = [p for section in ("teacher", "target") for p in getattr(learner, section, torch.nn.Module()).parameters()]
    assert frozen
    assert not any(parameter.requires_grad for parameter in frozen)
    for parameter in frozen:
        parameter.requires_grad_()  # as if someone had forgotten: still nothing may arrive
    for x in (batch.view1, batch.view2, batch.other):
        x.requires_grad_()
    _outcome(method, learner, batch).loss.backward()
    assert all(parameter.grad is None for parameter in frozen)
    trained = [p for section in ("encoder", "projector", "predictor") for p in getattr(learner, section).parameters()]
    assert all(parameter.grad is not None and parameter.grad.abs().sum() > 0 for parameter in trained)
    assert all(x.grad.abs().sum() > 0 for x in (batch.view1, batch.view2, batch.other))


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_batches_share_a_pass_or_not(micro: Experiment, objective: str) -> None:
    method = build(_with(micro, f"objective={objective}"))
    found = {}
    for paired in (False, True):
        learner = _learner(method)
        learner.paired = paired
        outcome = _outcome(method, learner, _batch(6))
        outcome.loss.backward()
        gradient = torch.cat([p.grad.flatten() for p in learner.parameters() if p.grad is not None])
        buffers = torch.cat([b.flatten() for b in learner.buffers() if b.is_floating_point()])
        found[paired] = torch.stack([outcome.loss, *outcome.terms.values()]).detach(), gradient, buffers
    for apart, at_once in zip(found[False], found[True], strict=True):
        assert torch.allclose(apart, at_once, rtol=1e-5, atol=1e-5)


def test_passes_of_three_batches_are_one(micro: Experiment) -> None:
    learner = build(_with(micro)).learner().train()
    sizes = []
    learner.encoder.register_forward_hook(lambda _, given, __: sizes.append(len(given[0])))
    batches = _batch(4).view1, _batch(4, 1).view1, _batch(4, 2).view1
    apart = learner.together(learner.encoder, *batches)
    learner.paired = True
    at_once = learner.together(learner.encoder, *batches)
    assert sizes == [4, 4, 4, 12]
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(apart, at_once, strict=True))


@pytest.mark.parametrize(("objective", "passes"), [("simclr", [3, 2]), ("byol", [3, 2, 2])])
def test_nothing_is_computed_twice(micro: Experiment, objective: str, passes: list[int]) -> None:
    """Batches through an encoder: three online, two of the teacher, and two of BYOL's target network."""
    method = build(_with(micro, f"objective={objective}"))
    learner, n = method.learner().train(), 4
    learner.paired = True
    seen: list[int] = []
    for encoder in (learner.encoder, learner.teacher[0], *([learner.target[0]] if objective == "byol" else [])):
        encoder.register_forward_hook(lambda _, given, __: seen.append(len(given[0]) // n))
    _outcome(method, learner, _batch(n))
    assert seen == passes


# Rounds.


def _federation(experiment: Experiment) -> tuple[Method, LocalBackend, FederationState, list[int]]:
    dataset = load_dataset(experiment.dataset, experiment.data)
    shares = make_partition(dataset, experiment)
    method = build(experiment)
    backend = LocalBackend(method, dataset.train, shares)
    return method, backend, initial_state(method, "cpu"), [len(share) for share in shares]


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_the_teacher_is_the_global_model_of_the_round(micro: Experiment, objective: str) -> None:
    method, backend, state, examples = _federation(_with(micro, f"objective={objective}"))
    model, teachers = backend.lanes[0].model, []
    spans = [model.layout.span(name) for name in ("encoder", "projector")]
    size = spans[1].stop  # they lie at the front of the vector
    assert spans[0].start == 0
    for _ in range(2):
        sent = state.server.model.params[:size]
        state, _ = play_round(state, method, backend, examples, Callback())
        teacher = model.section("teacher").params
        assert torch.equal(teacher, sent)  # after the training of three clients
        assert not torch.equal(teacher, model.params[:size])
        teachers.append(teacher.clone())
    assert not torch.equal(*teachers)

    model.params.zero_()
    model.buffers.fill_(9.0)
    method.receive(model, state.server, state.memories.get(0), Task(3, 0, 1, 0.1, 0.0))
    assert torch.equal(model.section("teacher").params, state.server.model.params[:size])
    statistics = model.buffer_layout.span("projector").stop
    assert torch.equal(model.section("teacher").buffers, state.server.model.buffers[:statistics])
    x = torch.randn(3, 3, 16, 16)
    learner = model.module.eval()
    assert torch.equal(learner.teacher(x), learner.projector(learner.encoder(x)))


@pytest.mark.parametrize("target", ["local", "shared", "fresh"])
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_the_teacher_never_travels_and_is_not_remembered(
    micro: Experiment, tmp_path: Path, objective: str, target: str
) -> None:
    run = fedu2.train(_with(micro, f"objective={objective}", f"byol.target={target}"), tmp_path / "run")
    newest = max((run.path / "checkpoint").glob("round-*"))
    server = load_file(newest / "server.safetensors")
    remembered = [set(load_file(path)) for path in newest.glob("client-*")]
    shared = objective == "byol" and target == "shared"
    expected = {"encoder", "projector", "predictor", *(["target"] if shared else [])}
    assert {name.partition(".")[0] for name in server} == expected
    kept = {"target.params", "target.buffers"}
    assert remembered == ([kept] * 3 if objective == "byol" and target == "local" else [])

    method = build(run.experiment)
    whole = FlatModel(method.learner())
    encoder, projector, teacher = (
        sum(p.numel() for p in getattr(whole.module, name).parameters()) for name in ("encoder", "projector", "teacher")
    )
    assert teacher == encoder + projector
    left_out = teacher * (2 if objective == "byol" and not shared else 1)
    assert method.travelling[0] == len(whole.params) - left_out
    assert run.history[-1]["bytes_up"] == run.history[-1]["bytes_down"] == 3 * 4 * sum(method.travelling)


def test_the_learner_depends_on_the_seed_alone(micro: Experiment) -> None:
    def weights(*settings: str) -> Tensor:
        return FlatModel(build(_with(micro, "objective=simclr", *settings)).learner()).section("predictor").params

    torch.manual_seed(1)
    before = torch.random.get_rng_state()
    first = weights()
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.manual_seed(2)
    assert torch.equal(weights(), first)
    assert not torch.equal(weights("seed=1"), first)


# Other images.


@dataclass(frozen=True)
class _Recording(FedX):
    """Keeps what it was shown."""

    seen: list[Batch] = field(default_factory=list)

    def outcome(self, learner: Objective, batch: Batch, generator: torch.Generator) -> Outcome:
        self.seen.append(batch)
        return super().outcome(learner, batch, generator)


def _shown(
    experiment: Experiment, shares: Sequence[Sequence[int]], clients: Sequence[int], round_: int = 1
) -> dict[int, list[Batch]]:
    """What clients with these shares of the images are shown in three steps, one client after the other."""
    aggregator = aggregators["fedavg"](experiment)
    method = _Recording(experiment, aggregator, scratch=("teacher",), wants_others=True)
    images = load_dataset(experiment.dataset, experiment.data).train
    backend = LocalBackend(method, images, [torch.tensor(share) for share in shares])
    server, shown = initial_state(method, "cpu").server, {}
    for client in clients:
        method.seen.clear()
        list(backend.run([Task(round_, client, 3, 0.05, 0.0)], server, {}, Callback()))
        shown[client] = list(method.seen)
    return shown


def _rows(images: Tensor) -> set[bytes]:
    return {image.contiguous().numpy().tobytes() for image in images}


def test_other_images_depend_on_seed_round_and_client_alone(micro: Experiment) -> None:
    experiment = _with(micro, "objective=simclr", *UNCHANGED, "batch_size=16")
    shares = range(60), range(60, 160), range(60, 160)  # the last two hold the same images
    images = load_dataset("sample", experiment.data).train.images
    shown, backwards = _shown(experiment, shares, [0, 1, 2]), _shown(experiment, shares, [2, 1, 0])
    for client, share in enumerate(shares):
        held = _rows(plain_view(images[share]))
        for batch, again in zip(shown[client], backwards[client], strict=True):
            assert torch.equal(batch.other, again.other)
            assert _rows(batch.other) <= held
            assert _rows(batch.other) != _rows(batch.view1)
        assert all(_rows(a.other) != _rows(b.other) for a, b in pairwise(shown[client]))
    first = _rows(shown[1][0].other)
    assert first != _rows(shown[2][0].other)
    assert first != _rows(_shown(experiment, shares, [1], round_=2)[1][0].other)
    assert first != _rows(_shown(_with(experiment, "seed=1"), shares, [1])[1][0].other)


def test_clients_smaller_than_a_batch(micro: Experiment, tmp_path: Path) -> None:
    """Two images and a batch of 32: the other images are the same two, in other views."""
    shares = [0, 1], list(range(2, 10)), list(range(10, 80))
    shown = _shown(_with(micro, "objective=simclr", *UNCHANGED), shares, [0, 1, 2])
    assert [len(batch.other) for batch in shown[0]] == [2, 2, 2]
    assert _rows(shown[0][0].other) == _rows(shown[0][0].view1)
    assert all(len(batch.other) == len(batch.view1) for batches in shown.values() for batch in batches)
    partition = tmp_path / "partition.json"
    partition.write_text(json.dumps(shares))
    settings = "partition=file", f"split.file={partition}", "local_steps=epochs", "local_epochs=2"
    for objective in OBJECTIVES:
        run = fedu2.train(_with(micro, *settings, f"objective={objective}"), tmp_path / objective)
        assert all(math.isfinite(run.history[-1][name]) for name in TERMS)
        assert run.history[-1]["loss"] == pytest.approx(sum(run.history[-1][name] for name in TERMS), rel=1e-5)
