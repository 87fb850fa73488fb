"""FedEMA, through real rounds and against numbers worked out by hand.

By hand, on the toy federation: θ = 0, learning rate ½, one step on ½‖θ − c‖², so that a client ends half-way between
its start and c. A red client, c = (2, −2, −2), ends its first round at (1, −1, −1), a green one, c = (−2, 2, −2), at
(−1, 1, −1); the global model is (0, 0, −1). The green client mirrors the red one, so the third coordinate alone is ever
left in the global model. With τ = ½:

    round 2   μ = ½, start (½, −½, −1), end (1¼, −1¼, −1½), global (0, 0, −1½)
    round 3   distance_to_global: d went from √2 to 1¼√2, so μ = ½ · 1¼ = 5/8
              last_drift: d went from √3 to ‖(¾, −¾, −½)‖ = √(11/8), so μ = ½ √(11/24)
"""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from fedu2.data import load_dataset, make_partition
from fedu2.experiment import Experiment
from fedu2.federation.callbacks import Callback
from fedu2.federation.checkpoint import Checkpoints
from fedu2.federation.local import LocalBackend
from fedu2.federation.rounds import FederationState, initial_state, play_round
from fedu2.methods import Learner, Memory, Method, ServerState, Task, build, methods, resolve
from fedu2.models.flat import FlatModel
from toy import colours, play

RED, GREEN = (255, 0, 0), (0, 255, 0)
REFERENCES = ["distance_to_global", "last_drift"]


def _toy(**values: object) -> Method:
    settings = {
        "method": "fedema",
        "objective": "toy",
        "views.recipe": "none",
        "optimizer.momentum": 0.0,
        "optimizer.weight_decay": 0.0,
        "optimizer.lr": 0.5,
        "local_steps": 1,
        "batch_size": 4,
        "fedema.tau": 0.5,
        "fedema.divergence": "distance_to_global",
    }
    return methods["fedema"].build(Experiment.parse({**settings, **values}))


def _setting(
    micro: Experiment, **settings: object
) -> tuple[Method, LocalBackend, FederationState, list[int], list[dict]]:
    """A federation of BYOL clients that has played some rounds."""
    rounds = int(settings.pop("played", 1))  # type: ignore[call-overload]
    experiment = resolve(micro.with_(**{"method": "fedema", "local_steps": 1, **settings}))
    dataset = load_dataset(experiment.dataset, experiment.data)
    shares = make_partition(dataset, experiment)
    method = build(experiment)
    backend = LocalBackend(method, dataset.train, shares)
    state, examples, records = initial_state(method, "cpu"), [len(share) for share in shares], []
    for _ in range(rounds):
        state, record = play_round(state, method, backend, examples, Callback())
        records.append(record)
    return method, backend, state, examples, records


def _receive(method: Method, model: Learner, server: ServerState, memory: Memory | None, task: Task) -> None:
    """Take a model in where another client has left its own."""
    model.params.fill_(7.0)
    model.buffers.fill_(7.0)
    method.receive(model, server, memory, task)


def _at(round_: int) -> Task:
    return Task(round_, 0, 1, 0.1, 0.0)


@pytest.mark.parametrize(
    ("reference", "third"), [("distance_to_global", 5 / 8), ("last_drift", math.sqrt(11 / 24) / 2)], ids=REFERENCES
)
def test_three_rounds_by_hand(reference: str, third: float) -> None:
    images, shares = colours((4, RED), (4, GREEN))
    method = _toy(**{"fedema.divergence": reference})
    state, records = play(method, images, shares, rounds=3)
    assert [record["fedema.mu"] for record in records] == pytest.approx([0, 0.5, third], rel=1e-6)
    start = torch.tensor([1.25 * third, -1.25 * third, -1.5])
    assert torch.allclose(state.memories[0]["online.params"], (start + torch.tensor([2.0, -2.0, -2.0])) / 2, atol=1e-6)
    assert torch.allclose(state.server.model.params, torch.tensor([0.0, 0.0, -1.75]), atol=1e-6)
    first = math.sqrt(2) if reference == "distance_to_global" else math.sqrt(3)
    assert float(state.memories[1]["scale"]) == pytest.approx(0.5 / first, rel=1e-6)  # set once, and kept


def test_a_constant_scale_in_place_of_the_autoscaler() -> None:
    images, shares = colours((4, RED), (4, GREEN))
    state, records = play(_toy(**{"fedema.scale": 0.25}), images, shares, rounds=2)
    assert [record["fedema.mu"] for record in records] == pytest.approx([0, 0.25 * math.sqrt(2)], rel=1e-6)
    assert "scale" not in state.memories[0]


@pytest.mark.parametrize("reference", REFERENCES)
@pytest.mark.parametrize(("cap", "second"), [(1.0, 0.7), (0.3, 0.3)])
def test_mu_is_tau_in_the_second_round(micro: Experiment, reference: str, cap: float, second: float) -> None:
    """Three uneven BYOL clients: each has a scale of its own, so that all of them come to τ."""
    *_, records = _setting(micro, fedema__divergence=reference, fedema__cap=cap, played=3, rounds=3)
    assert [record["fedema.mu"] for record in records[:2]] == pytest.approx([0, second], rel=1e-6)
    assert 0 < records[2]["fedema.mu"] <= cap
    if cap == 1:
        assert abs(records[2]["fedema.mu"] - 0.7) > 1e-3  # the scale stays, the divergence changes


@pytest.mark.parametrize("scale", [1e9, 0.0])
def test_mu_ends_at_one_and_at_zero(micro: Experiment, scale: float) -> None:
    """Capped at 1 a client goes on with its own model; at 0 it is a client of FedBYOL."""
    method, backend, state, *_ = _setting(micro, fedema__scale=scale)
    model, server, memory = backend.lanes[0].model, state.server, state.memories[0]
    _receive(method, model, server, memory, _at(2))
    params, buffers = method.travelling
    assert torch.equal(model.params[:params], memory["online.params"] if scale else server.model.params)
    assert torch.equal(model.buffers[:buffers], memory["online.buffers"] if scale else server.model.buffers)
    assert torch.equal(model.section("target").params, memory["target.params"])
    assert method.notes(model, server, memory, _at(2)) == {"fedema.mu": 1.0 if scale else 0.0}


@pytest.mark.parametrize("settings", [{"fedema__cap": 0.0}, {"fedema__tau": 0.0}], ids=str)
def test_without_merging_it_is_fedbyol(micro: Experiment, settings: dict[str, float]) -> None:
    *_, merging, _, _ = _setting(micro, played=2)
    *_, state, _, _ = _setting(micro, played=2, **settings)
    *_, plain, _, _ = _setting(micro, played=2, method="fedbyol")
    assert torch.equal(state.server.model.params, plain.server.model.params)
    assert torch.equal(state.server.model.buffers, plain.server.model.buffers)
    assert torch.equal(state.memories[0]["target.params"], plain.memories[0]["target.params"])
    assert not torch.equal(merging.server.model.params, plain.server.model.params)


@pytest.mark.parametrize("rotation", [0.0, 1.0])
def test_everything_but_the_target_is_merged(micro: Experiment, rotation: float) -> None:
    method, backend, state, *_ = _setting(micro, rotation__weight=rotation)
    model, server, memory = backend.lanes[0].model, state.server, state.memories[0]
    _receive(method, model, server, memory, _at(2))
    for name in ("encoder", "projector", "predictor", *(["rotation"] if rotation else [])):
        span, buffer_span = method.layouts[0].span(name), method.layouts[1].span(name)
        own, ours = memory["online.params"][span], server.model.params[span]
        assert (own - ours).abs().max() > 1e-4
        assert torch.allclose(model.section(name).params, 0.7 * own + 0.3 * ours, atol=1e-6)
        merged = 0.7 * memory["online.buffers"][buffer_span] + 0.3 * server.model.buffers[buffer_span]
        assert torch.allclose(model.section(name).buffers, merged, rtol=1e-4, atol=1e-6)
    assert not torch.allclose(memory["online.buffers"], server.model.buffers, rtol=1e-3)
    assert torch.equal(model.section("target").params, memory["target.params"])
    assert torch.equal(model.section("target").buffers, memory["target.buffers"])


def test_a_shared_target_comes_from_the_server(micro: Experiment) -> None:
    method, backend, state, *_ = _setting(micro, byol__target="shared", fedema__scale=1e9)
    model, memory = backend.lanes[0].model, state.memories[0]
    _receive(method, model, state.server, memory, _at(2))
    online = len(memory["online.params"])
    assert torch.equal(model.params[:online], memory["online.params"])
    assert torch.equal(model.params[online:], state.server.model.params[online:])
    assert len(model.params[online:]) == len(model.section("target").params) > 0


def test_models_that_do_not_differ_leave_the_scale_unset() -> None:
    """One client: the new global model is its own. Nothing is divided by d = 0, and the next d > 0 sets the scale."""
    method = _toy(**{"fedema.tau": 0.4})
    images, shares = colours((4, RED))
    state, records = play(method, images, shares, rounds=3)
    assert [record["fedema.mu"] for record in records] == [0, 0, 0]
    assert "scale" not in state.memories[0]
    assert torch.allclose(state.server.model.params, torch.tensor([1.75, -1.75, -1.75]), atol=1e-6)
    model = FlatModel(method.learner())
    elsewhere = ServerState(type(state.server.model)(state.server.model.params + 1, state.server.model.buffers))
    assert method.notes(model, elsewhere, state.memories[0], _at(4)) == {"fedema.mu": pytest.approx(0.4)}
    assert float(method.remember(model, elsewhere, state.memories[0], _at(4))["scale"]) > 0


def test_a_training_that_moves_nothing_leaves_the_scale_unset() -> None:
    method = _toy(**{"fedema.divergence": "last_drift"})
    model = FlatModel(method.learner())
    server = ServerState(model.state(*method.travelling))
    memory = method.remember(model, server, None, _at(1))
    assert "scale" not in memory
    assert method.notes(model, server, memory, _at(2)) == {"fedema.mu": 0.0}
    model.params.add_(1.0)
    again = method.remember(model, server, memory, _at(2))
    assert float(again["scale"]) == pytest.approx(0.5 / math.sqrt(3))


@pytest.mark.parametrize("reference", REFERENCES)
def test_after_an_absence_a_client_starts_over(micro: Experiment, reference: str) -> None:
    """With the global model for online, predictor and target, as at first sight; with the scale that it had."""
    method, backend, state, *_ = _setting(micro, played=2, fedema__divergence=reference)
    model, server, memory = backend.lanes[0].model, state.server, state.memories[0]
    _receive(method, model, server, memory, _at(3))
    assert method.notes(model, server, memory, _at(3))["fedema.mu"] > 0  # trained in round 2
    _receive(method, model, server, memory, _at(4))
    assert method.notes(model, server, memory, _at(4)) == {"fedema.mu": 0.0}
    back = model.params.clone(), model.buffers.clone()
    _receive(method, model, server, None, _at(4))
    assert torch.equal(model.params, back[0])
    assert torch.equal(model.buffers, back[1])
    params, buffers = method.travelling
    assert torch.equal(back[0][:params], server.model.params)
    assert torch.equal(back[1][:buffers], server.model.buffers)
    online = torch.cat([model.section(name).params for name in ("encoder", "projector")])
    assert torch.equal(model.section("target").params, online)

    model.params.add_(0.1)  # trains
    kept = method.remember(model, server, memory, _at(4))
    assert torch.equal(kept["scale"], memory["scale"])
    assert int(kept["round"]) == 4
    assert method.notes(model, server, kept, _at(5))["fedema.mu"] > 0
    if reference == "last_drift":  # it began with the global model, not with a merged one
        started_anew = method.remember(model, server, None, _at(4))
        assert torch.equal(kept["divergence"], started_anew["divergence"])


@pytest.mark.parametrize("reference", REFERENCES)
def test_the_scale_of_a_client_that_was_absent_in_its_second_round(micro: Experiment, reference: str) -> None:
    """The last drift has set it already; the distance to the global model sets it when first it merges."""
    method, backend, state, *_ = _setting(micro, fedema__divergence=reference)
    model, server, memory = backend.lanes[0].model, state.server, state.memories[0]
    _receive(method, model, server, memory, _at(5))
    model.params.add_(0.1)
    kept = method.remember(model, server, memory, _at(5))
    if reference == "last_drift":
        assert torch.equal(kept["scale"], memory["scale"])
    else:
        assert "scale" not in memory
        assert "scale" not in kept
        assert method.notes(model, server, kept, _at(6)) == {"fedema.mu": pytest.approx(0.7)}


@pytest.mark.parametrize("reference", REFERENCES)
def test_merging_whatever_the_age(micro: Experiment, reference: str) -> None:
    method, backend, state, *_ = _setting(micro, fedema__divergence=reference, fedema__after_absence="merge")
    model, server, memory = backend.lanes[0].model, state.server, state.memories[0]
    _receive(method, model, server, memory, _at(2))
    next_round = model.params.clone()
    _receive(method, model, server, memory, _at(9))
    assert torch.equal(model.params, next_round)
    assert method.notes(model, server, memory, _at(9)) == {"fedema.mu": pytest.approx(0.7)}
    assert not torch.equal(model.params[: len(server.model.params)], server.model.params)
    assert torch.equal(model.section("target").params, memory["target.params"])


def test_a_client_first_seen_late_takes_everything_from_the_global_model(micro: Experiment) -> None:
    method, backend, state, *_ = _setting(micro)
    model, server = backend.lanes[0].model, state.server
    _receive(method, model, server, None, _at(8))
    params, buffers = method.travelling
    assert torch.equal(model.params[:params], server.model.params)
    assert torch.equal(model.buffers[:buffers], server.model.buffers)
    online = torch.cat([model.section(name).params for name in ("encoder", "projector")])
    assert torch.equal(model.section("target").params, online)
    assert method.notes(model, server, None, _at(8)) == {"fedema.mu": 0.0}


@pytest.mark.parametrize("after_absence", ["overwrite", "merge"])
def test_absence_through_real_rounds(micro: Experiment, after_absence: str) -> None:
    """One client of three a round. While it overwrites, only who trained in the round before can merge."""
    *_, records = _setting(
        micro,
        participation=0.4,
        rounds=8,
        played=8,
        fedema__after_absence=after_absence,
        fedema__divergence="last_drift",
    )
    seen: set[int] = set()
    before, returns = -1, 0
    for record in records:
        (client,) = record["clients"]
        merges = client == before if after_absence == "overwrite" else client in seen
        assert (record["fedema.mu"] > 0) == merges
        returns += client in seen and client != before
        seen.add(client)
        before = client
    assert returns > 0


@pytest.mark.parametrize("reference", REFERENCES)
def test_memory_survives_a_checkpoint(micro: Experiment, tmp_path: Path, reference: str) -> None:
    method, backend, state, examples, _ = _setting(micro, fedema__divergence=reference, played=2)
    checkpoints = Checkpoints(tmp_path / "checkpoint", *method.layouts)
    checkpoints.save(state, {})
    loaded, _, _ = checkpoints.latest("cpu") or pytest.fail("nothing was written")
    straight, record = play_round(state, method, backend, examples, Callback())
    resumed, again = play_round(loaded, method, backend, examples, Callback())
    assert record == again
    assert 0 < record["fedema.mu"] != 0.7
    assert torch.equal(straight.server.model.params, resumed.server.model.params)
    for client, memory in straight.memories.items():
        assert memory.keys() == resumed.memories[client].keys()
        assert all(torch.equal(resumed.memories[client][name], tensor) for name, tensor in memory.items())


@pytest.mark.parametrize(("reference", "scalars"), [("distance_to_global", 8), ("last_drift", 8 + 8 + 4)])
def test_what_a_client_of_resnet18_remembers(reference: str, scalars: int) -> None:
    """Target and online network; the round in 8 bytes, then λ in 8 and d in 4."""
    experiment = Experiment.parse({"method": "fedema", "encoder": "resnet18", "fedema.divergence": reference})
    method = build(resolve(experiment))
    model = FlatModel(method.learner())
    server = ServerState(model.state(*method.travelling))
    model.params.mul_(1.01)  # trains
    memory = method.remember(model, server, None, _at(1))
    target, online = 4 * (13_270_592 + 13_696), 4 * (15_372_352 + 17_792)
    assert sum(tensor.numel() * tensor.element_size() for tensor in memory.values()) == target + online + scalars
