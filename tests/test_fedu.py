"""FedU, and the divergence that it shares with FedEMA.

Worked out by hand on the toy federation: θ = q = 0, learning rate ½, one step on ½‖θ − c‖² + ½‖q − c‖². A red client,
c = (2, −2, −2), ends its first round at (1, −1, −1), a green one, c = (−2, 2, −2), at (−1, 1, −1); the global model is
(0, 0, −1). So d = √2 to the global model, and √3 for the training that led there.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from fedu2.data import load_dataset, make_partition
from fedu2.errors import UsageError
from fedu2.experiment import Experiment
from fedu2.federation.callbacks import Callback
from fedu2.federation.checkpoint import Checkpoints
from fedu2.federation.local import LocalBackend
from fedu2.federation.rounds import FederationState, initial_state, play_round
from fedu2.methods import Method, ServerState, Task, build, methods, resolve
from fedu2.methods.divergence import divergence, measured_layers
from fedu2.models import build_encoder
from fedu2.models.flat import FlatModel, Layout, ModelState
from fedu2.objectives import Outcome, objectives
from toy import Toy, colours, play

RED, GREEN = (255, 0, 0), (0, 255, 0)
REFERENCES = ["distance_to_global", "last_drift"]


class _Predictor(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.zeros(3))


@objectives.register("toy-with-predictor")
class ToyWithPredictor(Toy):
    """ℓ_a = ½‖θ − c‖² + ½‖q − c‖², q being all of a predictor."""

    def __init__(self, encoder: nn.Module, experiment: Experiment) -> None:
        super().__init__(encoder, experiment)
        self.predictor = _Predictor()

    def forward(self, view1: Tensor, view2: Tensor) -> Outcome:
        outcome = super().forward(view1, view2)
        colour = view1.mean((0, 2, 3))
        return replace(outcome, loss=outcome.loss + (self.predictor.value - colour).square().sum() / 2)


def _toy(**values: object) -> Method:
    settings = {
        "method": "fedu",
        "objective": "toy-with-predictor",
        "views.recipe": "none",
        "optimizer.momentum": 0.0,
        "optimizer.weight_decay": 0.0,
        "optimizer.lr": 0.5,
        "local_steps": 1,
        "batch_size": 4,
    }
    return methods["fedu"].build(Experiment.parse({**settings, **values}))


def _setting(experiment: Experiment) -> tuple[Method, LocalBackend, FederationState, list[int]]:
    experiment = resolve(experiment)
    dataset = load_dataset(experiment.dataset, experiment.data)
    shares = make_partition(dataset, experiment)
    method = build(experiment)
    backend = LocalBackend(method, dataset.train, shares)
    return method, backend, initial_state(method, "cpu"), [len(share) for share in shares]


def _layout(**shapes: tuple[int, ...]) -> Layout:
    return Layout.of((name.replace("__", "."), torch.empty(shape)) for name, shape in shapes.items())


def test_divergence_is_the_mean_of_the_layers_norms() -> None:
    layout = _layout(
        encoder__conv1__weight=(1, 2, 1, 1),  # 0..1: ‖(3, 4)‖ = 5
        encoder__bn__weight=(1,),  # 2
        encoder__shortcut__0__weight=(1, 1, 1, 1),  # 3
        encoder__conv2__weight=(1, 1, 1, 2),  # 4..5: ‖(0, 1)‖ = 1
        encoder__downsample__weight=(1, 1, 1, 1),  # 6
        projector__weight=(1, 1, 1, 1),  # 7
    )
    a = torch.tensor([1.0, 2.0, 0.0, 0.0, 5.0, 5.0, 0.0, 0.0])
    b = torch.tensor([4.0, -2.0, 9.0, 9.0, 5.0, 6.0, 9.0, 9.0])
    assert float(divergence(a, b, layout)) == pytest.approx((5 + 1) / 2)
    assert float(divergence(b, a[:7], layout)) == pytest.approx(3)  # a vector may end with the encoder
    assert float(divergence(a, a, layout)) == 0


def test_layers_without_convolutions() -> None:
    linear = _layout(
        encoder__0__weight=(2, 3), encoder__0__bias=(2,), encoder__cube=(1, 2, 3), projector__weight=(2, 2)
    )
    assert [entry.name for entry in measured_layers(linear)] == ["encoder.0.weight", "encoder.cube"]
    only_vectors = _layout(encoder__value=(3,), projector__weight=(2, 2))
    assert [entry.name for entry in measured_layers(only_vectors)] == ["encoder.value"]
    with pytest.raises(UsageError, match="no parameters"):
        measured_layers(_layout(projector__weight=(2, 2)))


@pytest.mark.parametrize(("name", "layers"), [("tiny", 7), ("resnet10", 9), ("resnet18", 17), ("resnet50", 49)])
def test_layers_of_resnets(name: str, layers: int) -> None:
    model = FlatModel(nn.ModuleDict({"encoder": build_encoder(name, 4), "projector": nn.Conv2d(3, 3, 3)}))
    measured = measured_layers(model.layout)
    assert len(measured) == layers
    # A slow version: the modules themselves, told apart by what they are and not by their names alone.
    shortcuts = {id(c) for n, m in model.module.named_modules() if n.endswith("shortcut") for c in m.modules()}
    expected = [c for c in model.module["encoder"].modules() if isinstance(c, nn.Conv2d) and id(c) not in shortcuts]
    assert [e.shape for e in measured] == [tuple(c.weight.shape) for c in expected]
    other = model.params + torch.randn_like(model.params)
    values = dict(model.layout.views(other))
    norms = [(values[e.name] - dict(model.layout.views(model.params))[e.name]).norm() for e in measured]
    assert float(divergence(model.params, other, model.layout)) == pytest.approx(float(sum(norms)) / layers, rel=1e-5)


@pytest.mark.parametrize(
    ("reference", "d"), [("distance_to_global", math.sqrt(2)), ("last_drift", math.sqrt(3))], ids=REFERENCES
)
@pytest.mark.parametrize("above", [True, False])
def test_the_predictor_is_replaced_only_below_the_threshold(reference: str, d: float, above: bool) -> None:
    """Replaced: q = (0, 0, −1) → (1, −1, −1.5).  Kept: q = (1, −1, −1) → (1.5, −1.5, −1.5).  θ is always replaced."""
    method = _toy(**{"fedu.divergence": reference, "fedu.threshold": d + (1e-3 if above else -1e-3)})
    images, shares = colours((4, RED), (4, GREEN))
    state, (first, second) = play(method, images, shares, rounds=2)
    assert first["fedu.replaced"] == 1
    assert first["fedu.divergence"] == 0
    assert second["fedu.replaced"] == (1 if above else 0)
    assert second["fedu.divergence"] == pytest.approx(d, rel=1e-6)
    own = [1.0, -1.0, -1.5] if above else [1.5, -1.5, -1.5]
    assert torch.allclose(state.memories[0]["predictor.params"], torch.tensor(own), atol=1e-6)
    # Encoders: from the mean (0, 0, −1) half-way to c, whatever became of the predictor.
    assert torch.allclose(state.server.model.params[:3], torch.tensor([0.0, 0.0, -1.5]), atol=1e-6)


def test_the_threshold_itself_is_too_far() -> None:
    """One client: the new global model is its own. d = 0 is not below 0."""
    method = _toy(**{"fedu.threshold": 0.0})
    images, shares = colours((4, RED))
    _, (first, second) = play(method, images, shares, rounds=2)
    assert (first["fedu.replaced"], second["fedu.replaced"], second["fedu.divergence"]) == (1, 0, 0)


def test_clients_decide_for_themselves() -> None:
    """Three red images for one green: global (½, −½, −1). d = ½√2 for red, 1.5√2 for green; μ = 1 lies between."""
    method = _toy(**{"fedu.threshold": 1.0})
    images, shares = colours((3, RED), (1, GREEN))
    state, (_, second) = play(method, images, shares, rounds=2)
    assert second["fedu.replaced"] == pytest.approx(3 / 4)
    assert second["fedu.divergence"] == pytest.approx((3 * 0.5 + 1.5) / 4 * math.sqrt(2), rel=1e-6)
    red, green = (state.memories[client]["predictor.params"] for client in (0, 1))
    assert torch.allclose(red, torch.tensor([1.25, -1.25, -1.5]), atol=1e-6)  # half-way from (½, −½, −1)
    assert torch.allclose(green, torch.tensor([-1.5, 1.5, -1.5]), atol=1e-6)  # half-way from its own (−1, 1, −1)


@pytest.mark.parametrize("reference", REFERENCES)
@pytest.mark.parametrize("threshold", [0.0, 1e9])
def test_what_a_client_starts_with(micro: Experiment, reference: str, threshold: float) -> None:
    """All sections with their batch-norm buffers, after a round and after a long absence, in a model used by others."""
    settings = {"method": "fedu", "fedu.divergence": reference, "fedu.threshold": threshold}
    method, backend, state, examples = _setting(Experiment.parse({**micro.flat(), **settings}))
    state, _ = play_round(state, method, backend, examples, Callback())
    model, server, memory = backend.lanes[0].model, state.server, state.memories[0]
    layout, buffer_layout = method.layouts
    for round_ in (2, 9):
        model.params.fill_(7.0)
        model.buffers.fill_(7.0)
        method.receive(model, server, memory, Task(round_, 0, 1, 0.1, 0.0))
        for name in ("encoder", "projector", "predictor"):
            sent = ModelState(server.model.params[layout.span(name)], server.model.buffers[buffer_layout.span(name)])
            keeps = name == "predictor" and threshold == 0
            params = memory["predictor.params"] if keeps else sent.params
            buffers = memory["predictor.buffers"] if keeps else sent.buffers
            assert torch.equal(model.section(name).params, params)
            assert torch.equal(model.section(name).buffers, buffers)
        assert torch.equal(model.section("target").params, memory["target.params"])
        assert torch.equal(model.section("target").buffers, memory["target.buffers"])
    assert not torch.equal(memory["predictor.params"], server.model.params[layout.span("predictor")])
    assert not torch.equal(memory["predictor.buffers"], server.model.buffers[buffer_layout.span("predictor")])


def test_with_a_large_threshold_it_is_fedbyol(micro: Experiment) -> None:
    def second_round(**settings: object) -> FederationState:
        method, backend, state, examples = _setting(micro.with_(**settings))
        for _ in range(2):
            state, _ = play_round(state, method, backend, examples, Callback())
        return state

    plain, large = second_round(method="fedbyol"), second_round(method="fedu", fedu__threshold=1e9)
    assert torch.equal(large.server.model.params, plain.server.model.params)
    assert torch.equal(large.server.model.buffers, plain.server.model.buffers)
    small = second_round(method="fedu", fedu__threshold=0.0)
    assert not torch.equal(small.server.model.params, plain.server.model.params)


def test_a_client_first_seen_late_takes_everything_from_the_global_model(micro: Experiment) -> None:
    method, backend, state, examples = _setting(micro.with_(method="fedu", fedu__threshold=0.0))
    state, _ = play_round(state, method, backend, examples, Callback())
    model = backend.lanes[0].model  # holds what the last client left
    task = Task(8, 0, 1, 0.1, 0.0)
    method.receive(model, state.server, None, task)
    sent = state.server.model
    assert torch.equal(model.params[: len(sent.params)], sent.params)
    assert torch.equal(model.buffers[: len(sent.buffers)], sent.buffers)
    online = torch.cat([model.section(name).params for name in ("encoder", "projector")])
    assert torch.equal(model.section("target").params, online)
    assert method.notes(model, state.server, None, task) == {"fedu.divergence": 0.0, "fedu.replaced": 1.0}


@pytest.mark.parametrize("reference", REFERENCES)
def test_memory_survives_a_checkpoint(micro: Experiment, tmp_path: Path, reference: str) -> None:
    """A threshold between the clients' divergences, so that both branches are taken after the checkpoint."""
    settings = {"method": "fedu", "fedu.divergence": reference}
    method, backend, state, examples = _setting(Experiment.parse({**micro.flat(), **settings}))
    state, _ = play_round(state, method, backend, examples, Callback())
    model = backend.lanes[0].model
    apart = [
        method.notes(model, state.server, memory, Task(2, client, 1, 0.1, 0.0))["fedu.divergence"]
        for client, memory in state.memories.items()
    ]
    assert min(apart) < max(apart)
    middle = (min(apart) + max(apart)) / 2
    method, backend, _, _ = _setting(Experiment.parse({**micro.flat(), **settings, "fedu.threshold": middle}))
    checkpoints = Checkpoints(tmp_path / "checkpoint", *method.layouts)
    checkpoints.save(state, {})
    loaded, _, _ = checkpoints.latest("cpu") or pytest.fail("nothing was written")
    straight, record = play_round(state, method, backend, examples, Callback())
    resumed, again = play_round(loaded, method, backend, examples, Callback())
    assert record == again
    assert 0 < record["fedu.replaced"] < 1
    assert torch.equal(straight.server.model.params, resumed.server.model.params)
    for client, memory in straight.memories.items():
        assert memory.keys() == resumed.memories[client].keys()
        assert all(torch.equal(resumed.memories[client][name], tensor) for name, tensor in memory.items())


TARGET, PREDICTOR, ENCODER = 4 * (13_270_592 + 13_696), 4 * (2_101_760 + 4_096), 4 * 11_168_832


@pytest.mark.parametrize(
    ("reference", "cost"),
    [("distance_to_global", TARGET + PREDICTOR + ENCODER), ("last_drift", TARGET + PREDICTOR + 4)],
    ids=REFERENCES,
)
def test_what_a_client_of_resnet18_remembers(reference: str, cost: int) -> None:
    experiment = Experiment.parse({"method": "fedu", "encoder": "resnet18", "fedu.divergence": reference})
    method = build(resolve(experiment))
    model = FlatModel(method.learner())
    server = ServerState(model.state(*method.travelling))
    memory = method.remember(model, server, None, Task(1, 0, 1, 0.1, 0.0))
    assert sum(tensor.numel() * tensor.element_size() for tensor in memory.values()) == cost
    assert ("encoder.params" in memory) == (reference == "distance_to_global")
