"""The server's step: factor and momentum on what the aggregator found, and what is sent ahead of the model."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import fedu2
from fedu2.aggregators import Aggregate, Updates
from fedu2.aggregators.fedavg import fedavg
from fedu2.data import load_dataset, make_partition
from fedu2.errors import TrainingError
from fedu2.experiment import Experiment
from fedu2.federation.callbacks import Callback
from fedu2.federation.checkpoint import Checkpoints
from fedu2.federation.local import LocalBackend
from fedu2.federation.rounds import FederationState, initial_state, play_round
from fedu2.federation.server_step import ahead, options_at, step
from fedu2.files import digest_of
from fedu2.methods import build, resolve
from fedu2.options import ServerOptions

START, FOUND = torch.tensor([1.0, 2.0]), torch.tensor([2.0, 0.0])  # the aggregator moved by (1, −2)
BEFORE = torch.tensor([4.0, 4.0])


def _last(run: Path, name: str) -> Path:
    return max((run / "checkpoint").glob("round-*")) / name


def _with(experiment: Experiment, *settings: str) -> Experiment:
    return Experiment.parse(experiment.flat(), list(settings))


def _played(experiment: Experiment, rounds: int) -> tuple[list[FederationState], list[Updates]]:
    """The states before and after every round, and what the aggregator, FedAvg, was given in each."""
    updates: list[Updates] = []

    def catch(seen: Updates) -> Aggregate:
        updates.append(seen)
        return fedavg(seen)

    method = replace(build(experiment), aggregator=catch)
    dataset = load_dataset(experiment.dataset, experiment.data)
    shares = make_partition(dataset, experiment)
    backend = LocalBackend(method, dataset.train, shares)
    states = [initial_state(method, "cpu")]
    for _ in range(rounds):
        after, _ = play_round(states[-1], method, backend, [len(share) for share in shares], Callback())
        states.append(after)
    return states, updates


@pytest.mark.parametrize(
    ("options", "velocity", "params", "after", "sent"),
    [
        ({"lr": 0.5}, None, (1.5, 1.0), None, (1.5, 1.0)),
        ({"lr": 1.5}, None, (2.0, 0.0), (1.0, -2.0), (2.5, -1.0)),
        ({"lr": 0.5, "momentum": 0.25}, None, (1.5, 1.0), (1.0, -2.0), (1.5, 1.0)),
        ({"lr": 0.5, "momentum": 0.25}, BEFORE, (2.0, 1.5), (2.0, -1.0), (2.0, 1.5)),
        ({"momentum": 0.75}, BEFORE, (5.0, 3.0), (4.0, 1.0), (5.0, 3.0)),
        ({"lr": 2, "momentum": 0.75}, BEFORE, (5.0, 3.0), (4.0, 1.0), (9.0, 4.0)),
    ],
)
def test_by_hand(
    options: dict[str, float],
    velocity: torch.Tensor | None,
    params: tuple[float, float],
    after: tuple[float, float] | None,
    sent: tuple[float, float],
) -> None:
    """θ_g, which is judged, and θ_s, which clients are sent."""
    found, kept = step(START, FOUND, velocity, ServerOptions(**options))
    assert found.tolist() == list(params)
    assert kept is None if after is None else kept is not None and kept.tolist() == list(after)
    assert ahead(found, kept, ServerOptions(**options)).tolist() == list(sent)
    assert found.tolist() == list(params)  # as it was


def test_by_default_the_aggregate_is_taken_as_it_is() -> None:
    assert step(START, FOUND, None, ServerOptions()) == (FOUND, None)
    assert ahead(FOUND, None, ServerOptions()) is FOUND


@pytest.mark.parametrize(
    ("options", "target"),
    [({"lr": 0.5}, 1.0), ({"lr": 2.0}, 0.0), ({"lr": 3.0, "momentum": 0.5}, 0.0), ({"momentum": 0.5}, 0.0)],
)
def test_a_target_network_goes_no_farther_than_the_clients_targets(options: dict[str, float], target: float) -> None:
    velocity, chosen = (BEFORE if "momentum" in options else None), ServerOptions(**options)
    whole, _ = step(START, FOUND, velocity, chosen)
    params, kept = step(START, FOUND, velocity, chosen, trained=1)
    assert params.tolist() == [whole[0].item(), target]
    sent = ahead(params, kept, chosen, slice(1))
    assert sent.tolist() == [ahead(whole, kept, chosen)[0].item(), target]


@pytest.mark.parametrize("lr", [1.5, 2.0, 3.0])
def test_a_target_settles_where_the_clients_targets_are(lr: float) -> None:
    """Stepped like the rest it would be mirrored at them for ever with η = 2, and run away with 3."""
    target, options = torch.ones(1), ServerOptions(lr=lr)
    for _ in range(5):
        target = ahead(*step(target, torch.zeros(1), None, options, trained=0), options, slice(0))
    assert target.item() == 0


@pytest.mark.parametrize(
    ("options", "rounds", "expected"),
    [
        ({"lr": 2.0}, 4, [2, 2, 2, 2]),
        ({"lr": 2.0, "until": 0.5}, 4, [2, 2, 1, 1]),
        ({"lr": 2.0, "until": 0.7, "momentum": 0.5}, 5, [2, 2, 2, 1, 1]),
        ({"lr": 2.0, "until": 0.57}, 100, [2] * 57 + [1] * 43),  # 0.57 · 100 is less than 57
        ({"lr": 0.5, "until": 0.5}, 4, [0.5, 0.5, 0.5, 0.5]),  # no longer step that could end
    ],
)
def test_longer_steps_end_in_time(options: dict[str, float], rounds: int, expected: list[float]) -> None:
    chosen = [options_at(ServerOptions(**options), round_, rounds) for round_ in range(1, rounds + 1)]
    assert [each.lr for each in chosen] == expected
    assert {each.momentum for each in chosen} == {options.get("momentum", 0)}


def test_after_the_last_long_step_clients_are_sent_what_is_judged(micro: Experiment) -> None:
    """η = 3 after the first of three rounds, and 1 after the second: only the second begins ahead."""
    experiment = resolve(_with(micro, "rounds=3", "server.lr=3", "server.until=0.4"))
    states, updates = _played(experiment, 3)
    begun = zip(states, updates, strict=False)
    ahead_of = [not torch.equal(seen.start, state.server.model.params) for state, seen in begun]
    assert ahead_of == [False, True, False]
    assert [state.velocity is None for state in states] == [True, False, True, True]


def test_clients_are_sent_what_lies_ahead_of_the_model_that_is_judged(micro: Experiment) -> None:
    """η = 3: after the first round θ_g is the aggregate, and the second begins at θ_g + 2 v; targets, buffers stay."""
    experiment = resolve(_with(micro, "server.lr=3", "byol.target=shared"))
    method = build(experiment)
    states, updates = _played(experiment, 2)
    begun, judged = (state.server.model.params for state in states[:2])
    trained = method.trained
    assert torch.equal(judged, fedavg(replace(updates[0], clients=updates[0].clients.clone())).params)
    assert 0 < trained < len(judged)
    torch.testing.assert_close(updates[1].start[:trained], (judged + 2 * (judged - begun))[:trained])
    assert torch.equal(updates[1].start[trained:], judged[trained:])
    assert updates[1].buffers is not None
    assert torch.equal(updates[1].buffers.start, states[1].server.model.buffers)


@pytest.mark.parametrize("objective", ["byol", "simclr"])
def test_the_encoder_alone_may_lie_ahead(micro: Experiment, objective: str) -> None:
    experiment = resolve(_with(micro, f"objective={objective}", "server.lr=3", "server.parts=encoder"))
    layout = build(experiment).layouts[0]
    states, updates = _played(experiment, 2)
    begun, judged = (state.server.model.params for state in states[:2])
    encoder, ahead_of = layout.span("encoder"), updates[1].start != judged
    assert 0 < ahead_of[encoder].sum() == ahead_of.sum()
    torch.testing.assert_close(updates[1].start[encoder], (judged + 2 * (judged - begun))[encoder])


def test_a_longer_step_shows_from_the_second_round_on(micro: Experiment, tmp_path: Path) -> None:
    """What is judged after the first is the aggregate, whatever comes next."""
    for rounds, same in ((1, True), (2, False)):
        plain, longer = (
            fedu2.train(_with(micro, f"rounds={rounds}", f"server.lr={lr}"), tmp_path / f"{rounds}-{lr}").learner()
            for lr in (1, 2)
        )
        other = longer.state_dict()
        assert all(torch.equal(other[name], tensor) for name, tensor in plain.state_dict().items()) == same


@pytest.mark.parametrize("setting", ["server.momentum=0.5", "server.lr=1.5"])
def test_the_step_goes_on_where_a_run_was_stopped(micro: Experiment, tmp_path: Path, setting: str) -> None:
    experiment = _with(micro, "rounds=3", setting)
    whole = fedu2.train(experiment, tmp_path / "whole")
    fedu2.train(_with(experiment, "rounds=2"), tmp_path / "cut")
    resumed = fedu2.train(experiment, tmp_path / "cut", resume=True)
    for name in ("server.safetensors", "velocity.safetensors"):
        assert _last(resumed.path, name).read_bytes() == _last(whole.path, name).read_bytes()


def test_a_damaged_velocity_is_noticed(micro: Experiment, tmp_path: Path) -> None:
    run = fedu2.train(_with(micro, "rounds=1", "server.momentum=0.5"), tmp_path / "run")
    file = _last(run.path, "velocity.safetensors")
    file.write_bytes(file.read_bytes()[:-4] + b"\1\1\1\1")
    with pytest.raises(TrainingError, match=r"velocity\.safetensors is damaged"):
        fedu2.train(_with(micro, "rounds=2", "server.momentum=0.5"), run.path, resume=True)


# Checkpoints whose checksums are right, and whose content is not

KERNEL = "encoder.stem.0.weight"


def _changed(name: str, change: Callable[[Tensor], Tensor]) -> Callable[[Path], None]:
    """Change one kernel in a file of a checkpoint."""

    def harm(place: Path) -> None:
        tensors = load_file(place / name)
        save_file({**tensors, KERNEL: change(tensors[KERNEL]).contiguous()}, place / name)

    return harm


def _permuted(kernel: Tensor) -> Tensor:
    return kernel.permute(2, 3, 0, 1)


def _unbounded(kernel: Tensor) -> Tensor:
    return kernel.index_fill(0, torch.tensor([1]), float("inf"))


def _without_velocity(place: Path) -> None:
    (place / "velocity.safetensors").unlink()


def _sealed(place: Path) -> None:
    """Make the manifest right for the files that are there."""
    manifest = json.loads((place / "manifest.json").read_text())
    files = {path.name: path.read_bytes() for path in place.glob("*.safetensors")}
    manifest["files"] = {
        name: {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()} for name, content in files.items()
    }
    del manifest["digest"]
    (place / "manifest.json").write_text(json.dumps({**manifest, "digest": digest_of(manifest)}))


@pytest.fixture(scope="module")
def with_momentum(tmp_path_factory: pytest.TempPathFactory) -> fedu2.Run:
    values = {
        "data.image_size": 16, "clients": 2, "partition": "iid", "encoder": "tiny", "width": 4, "rounds": 1,
        "local_steps": 2, "batch_size": 32, "evaluation.every": 0, "server.momentum": 0.5,
    }  # fmt: skip
    return fedu2.train(Experiment.parse(values), tmp_path_factory.mktemp("runs") / "run")


@pytest.mark.parametrize(
    ("harm", "complaint"),
    [
        (_without_velocity, r"velocity\.safetensors is missing, and the server's step has momentum"),
        (_changed("velocity.safetensors", _permuted), rf"tensor '{KERNEL}' is torch\.float32 \(3, 3, "),
        (_changed("velocity.safetensors", _unbounded), r"velocity\.safetensors holds numbers that are not finite"),
        (_changed("server.safetensors", _permuted), rf"tensor '{KERNEL}' is torch\.float32 \(3, 3, "),
        (_changed("server.safetensors", Tensor.long), rf"tensor '{KERNEL}' is torch\.int64"),
        (_changed("server.safetensors", _unbounded), r"server\.safetensors holds numbers that are not finite"),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused_though_its_checksums_are_right(
    with_momentum: fedu2.Run, tmp_path: Path, harm: Callable[[Path], None], complaint: str
) -> None:
    run = fedu2.Run(shutil.copytree(with_momentum.path, tmp_path / "run"))
    place = _last(run.path, "")
    _sealed(place)
    run.learner()  # sealed as it was, it is read
    harm(place)
    _sealed(place)
    complaint = rf"round-000001 does not fit this model: {complaint}"
    with pytest.raises(TrainingError, match=complaint):
        run.learner()
    with pytest.raises(TrainingError, match=complaint):
        fedu2.train(_with(run.experiment, "rounds=2"), run.path, resume=True)


def test_before_the_first_round_there_is_no_velocity(micro: Experiment, tmp_path: Path) -> None:
    """Nor is there one in a checkpoint whose experiment has no such key yet."""
    method = build(resolve(_with(micro, "server.momentum=0.5")))
    state = initial_state(method, "cpu")
    for round_, experiment in ((0, {"server.momentum": 0.5}), (3, {}), (3, {"server.momentum": 0.0})):
        checkpoints = Checkpoints(tmp_path / f"{round_}-{len(experiment)}", *method.layouts)
        checkpoints.save(replace(state, round=round_), experiment)
        found = checkpoints.latest("cpu")
        assert found is not None
        assert found[0].velocity is None
