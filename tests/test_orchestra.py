from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

import fedu2
from fedu2.data import load_dataset, make_partition
from fedu2.experiment import Experiment
from fedu2.federation.backend import Backend, Observer
from fedu2.federation.callbacks import Callback
from fedu2.federation.local import LocalBackend
from fedu2.federation.rounds import FederationState, initial_state, play_round
from fedu2.methods import Batch, Memory, Reply, ServerState, Task, build, resolve
from fedu2.methods.clustering import clustering_loss, global_clusters, initial_clusters, local_clusters
from fedu2.methods.orchestra import OrchestraMethod
from fedu2.models.flat import FlatModel
from fedu2.objectives import Objective, Outcome
from fedu2.objectives.orchestra import Clusters, Orchestra, cluster_loss, information
from fedu2.seeds import generator

SMALL = [
    "method=orchestra",
    "orchestra.global_clusters=8",
    "orchestra.local_clusters=4",
    "orchestra.memory=48",
    "orchestra.server_steps=20",
    "orchestra.momentum=0.9",
]


def _with(experiment: Experiment, *settings: str) -> Experiment:
    return resolve(Experiment.parse(experiment.flat(), [*SMALL, *settings]))


def _setting(experiment: Experiment) -> tuple[LocalBackend, FederationState, list[int]]:
    dataset = load_dataset(experiment.dataset, experiment.data)
    shares = make_partition(dataset, experiment)
    method = build(experiment)
    backend = LocalBackend(method, dataset.train, shares)
    return backend, initial_state(method, "cpu"), [len(share) for share in shares]


def _learner(experiment: Experiment) -> Orchestra:
    """In training, with a target that differs from the online network, and with clusters."""
    learner = build(experiment).learner().train()
    assert isinstance(learner, Orchestra)
    noise = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in learner.target.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=noise))
    learner.clusters.begin(_unit(8, learner.clusters.centroids.shape[1]))
    return learner


def _unit(rows: int, size: int, seed: int = 0) -> Tensor:
    return F.normalize(torch.randn(rows, size, generator=torch.Generator().manual_seed(seed)), dim=1)


def _views(n: int = 6) -> tuple[Tensor, Tensor]:
    first, second = torch.randn(2, n, 3, 16, 16, generator=torch.Generator().manual_seed(1))
    return first, second


# The loss.


@given(n=st.integers(1, 6), g=st.integers(2, 6), d=st.integers(2, 5), tau=st.floats(0.05, 2.0), seed=st.integers(0, 99))
def test_cluster_loss_against_a_loop(n: int, g: int, d: int, tau: float, seed: int) -> None:
    z, t, centroids = _unit(n, d, seed), _unit(n, d, seed + 100), _unit(g, d, seed + 200)
    total = 0.0
    for i in range(n):
        aim = [math.exp(float(t[i] @ c) / tau) for c in centroids]
        seen = [math.exp(float(z[i] @ c) / tau) for c in centroids]
        total -= sum(a / sum(aim) * math.log(s / sum(seen)) for a, s in zip(aim, seen, strict=True))
    assert cluster_loss(z, t, centroids, tau).item() == pytest.approx(total / n, rel=1e-4, abs=1e-5)


def test_cluster_loss_by_hand() -> None:
    # Two clusters e1, e2 and τ = 1. The target is at e1: it aims at (e, 1)/(e + 1); the online network is at e2.
    e1, e2 = torch.eye(2).split(1)
    expected = math.log(math.e + 1) - 1 / (math.e + 1)  # −[e/(e + 1) (0 − log(e + 1)) + 1/(e + 1) (1 − log(e + 1))]
    assert cluster_loss(e2, e1, torch.eye(2), 1.0).item() == pytest.approx(expected, abs=1e-6)
    assert cluster_loss(e2, e1, torch.zeros(5, 2), 1.0).item() == pytest.approx(math.log(5), abs=1e-6)


def test_only_the_online_projections_get_a_gradient() -> None:
    z, t, centroids = (_unit(5, 4, seed).requires_grad_() for seed in range(3))
    cluster_loss(z, t, centroids.detach(), 0.1).backward()
    assert z.grad is not None
    assert z.grad.abs().sum() > 0
    assert t.grad is None


def test_the_second_view_is_trained_toward_the_targets_clusters_of_the_first(micro: Experiment) -> None:
    learner = _learner(_with(micro))
    view1, view2 = _views()
    outcome = learner(view1, view2)
    z = F.normalize(learner.projector(learner.encoder(view2)), dim=1)
    t = F.normalize(learner.target(view1), dim=1)
    assert torch.allclose(outcome.loss, cluster_loss(z, t, learner.clusters.centroids, 0.1), atol=1e-5)
    # In none of the other ways.
    for first, second in ((view2, view1), (view1, view1), (view2, view2)):
        other = cluster_loss(
            F.normalize(learner.projector(learner.encoder(second)), dim=1),
            F.normalize(learner.target(first), dim=1),
            learner.clusters.centroids,
            0.1,
        )
        assert not torch.allclose(outcome.loss, other, atol=1e-4)
    assert all(h.shape == (6, 16) for h in outcome.features)
    assert all(torch.allclose(F.normalize(p, dim=1), z, atol=1e-5) for p in outcome.projections)
    outcome.loss.backward()
    assert all(p.grad is None for p in learner.target.parameters())
    assert all(p.grad is not None for p in learner.encoder.parameters())
    assert learner.clusters.centroids.grad is None


def test_projections_end_in_a_norm_without_parameters(micro: Experiment) -> None:
    """Else what all images have in common makes every cluster alike to each of them, and the loss says nothing."""
    normed, plain = (_learner(_with(micro, f"orchestra.norm={norm}")).projector for norm in ("true", "false"))
    assert sum(p.numel() for p in normed.parameters()) == sum(p.numel() for p in plain.parameters())
    features = 5 + 0.1 * torch.randn(32, 16, generator=torch.Generator().manual_seed(0))
    z = normed(features)
    torch.testing.assert_close(z.mean(0), torch.zeros_like(z[0]), atol=1e-5, rtol=0)
    torch.testing.assert_close(z.var(0, unbiased=False), torch.ones_like(z[0]), atol=0.05, rtol=0)
    assert (
        F.normalize(z, dim=1).mean(0).square().sum() < 0.05 < F.normalize(plain(features), dim=1).mean(0).square().sum()
    )


def test_information_by_hand_and_at_its_ends() -> None:
    e = torch.eye(4)
    assert information(e, e, 1e-3).item() == pytest.approx(math.log(4), abs=1e-5)  # each image has its own cluster
    assert information(e[:2], e, 1e-3).item() == pytest.approx(math.log(2), abs=1e-5)
    assert information(e[[0, 0, 0]], e, 0.1).item() == pytest.approx(0, abs=1e-6)  # images that are one point
    assert information(e, e[[1, 1, 1]], 0.1).item() == pytest.approx(0, abs=1e-6)  # clusters that are one point
    # Two images at e1 and e2, two clusters, τ = 1: each has (e, 1)/(e + 1), the mean is (½, ½).
    p = math.e / (math.e + 1)
    expected = math.log(2) + p * math.log(p) + (1 - p) * math.log(1 - p)
    assert information(e[:2, :2], e[:2, :2], 1.0).item() == pytest.approx(expected, abs=1e-6)


def test_clusters_tell_images_apart_while_training(micro: Experiment) -> None:
    """More so with the norm, which takes off what images have in common; how much is logged in every round."""
    said = {}
    for norm in ("true", "false"):
        experiment = _with(micro, "rounds=3", "local_epochs=2", f"orchestra.norm={norm}")
        backend, state, sizes = _setting(experiment)
        method = build(experiment)
        for _ in range(3):
            state, record = play_round(state, method, backend, sizes, Callback())
        said[norm] = record["orchestra.information"]
    assert said["true"] > 0.5
    assert said["true"] > 1.2 * said["false"]


def test_options_reach_the_learner(micro: Experiment) -> None:
    options = ("orchestra.temperature=0.7", "orchestra.momentum=0.25", "orchestra.memory=5", "heads.out=6")
    experiment = _with(micro, *options)
    learner = _learner(experiment)
    assert learner.temperature == 0.7
    assert learner.clusters.memory.shape == (5, 6)
    assert learner.clusters.centroids.shape == (8, 6)
    before = [p.clone() for p in learner.target.parameters()]
    learner.after_step(0.5)
    online = [*learner.encoder.parameters(), *learner.projector.parameters()]
    for old, target, now in zip(before, learner.target.parameters(), online, strict=True):
        assert torch.allclose(target, 0.25 * old + 0.75 * now, atol=1e-6)
    assert build(experiment).prelude == 1
    assert build(_with(micro, "orchestra.memory=33")).prelude == 2  # batches of 32
    assert build(_with(micro, "orchestra.memory=64")).prelude == 2


# The memory.


@pytest.mark.parametrize("sizes", [[2, 2], [3, 3, 3], [2, 3, 4, 1], [5, 5], [7], [3, 12, 2]], ids=str)
def test_memory_is_first_in_first_out(sizes: list[int]) -> None:
    clusters, expected, row = Clusters(5, 4, 2), deque[list[float]](maxlen=5), 0
    place = clusters.memory.data_ptr()
    for size in sizes:
        new = torch.arange(2 * row, 2 * (row + size), dtype=torch.float32).view(size, 2) + 1
        clusters.push(new)
        expected.extend(new.tolist())
        row += size
        assert clusters.rows().tolist() == list(expected)
    assert clusters.memory.data_ptr() == place
    clusters.begin(torch.ones(4, 2))
    assert clusters.rows().shape == (0, 2)
    assert not clusters.memory.any()
    assert torch.equal(clusters.centroids, torch.ones(4, 2))
    clusters.begin(None)
    assert not clusters.centroids.any()


def test_memory_gets_the_targets_projections_of_the_first_view(micro: Experiment) -> None:
    learner = _learner(_with(micro))
    view1, view2 = _views()
    learner(view1, view2)
    assert torch.allclose(learner.clusters.rows(), F.normalize(learner.target(view1), dim=1), atol=1e-6)
    assert not learner.clusters.memory.requires_grad


# Client and server.


def test_receiving_empties_the_memory_and_takes_the_clusters_in(micro: Experiment) -> None:
    method = build(_with(micro))
    model = FlatModel(method.learner())
    server = ServerState(model.state(*method.travelling), {"centroids": _unit(8, 16, 3)})
    task = Task(1, 0, 1, 0.1, 0.0)
    clusters = model.module.clusters
    clusters.push(torch.ones(7, 16))
    method.receive(model, server, None, task)
    assert torch.equal(clusters.centroids, server.extra["centroids"])
    assert len(clusters.rows()) == 0
    method.receive(model, replace(server, extra={}), None, task)
    assert not clusters.centroids.any()
    assert model.buffer_layout.entries[-1].name == "clusters.centroids"
    assert all(entry.section != "clusters" for layout in method.layouts for entry in layout.entries)


def test_the_payload_clusters_what_is_in_the_memory(micro: Experiment) -> None:
    method = build(_with(micro))
    model = FlatModel(method.learner())
    points = _unit(11, 16, 3)
    model.module.clusters.push(points)
    sent = method.payload(model, Task(2, 1, 1, 0.1, 0.0))["centroids"]
    assert torch.equal(sent, local_clusters(points, 4, generator("cpu", 0, "local clusters", 2, 1)))
    for other in (Task(3, 1, 1, 0.1, 0.0), Task(2, 0, 1, 0.1, 0.0)):
        assert not torch.equal(sent, method.payload(model, other)["centroids"])
    model.module.clusters.begin(None)
    model.module.clusters.push(points[:3])
    assert torch.equal(method.payload(model, Task(2, 1, 1, 0.1, 0.0))["centroids"], points[[0, 1, 2, 0]])


def test_what_a_client_sends_does_not_depend_on_who_trained_before(micro: Experiment) -> None:
    backend, state, _ = _setting(_with(micro))
    server = replace(state.server, extra={"centroids": _unit(8, 16)})
    tasks = [Task(1, client, 1, 0.05, 0.0) for client in (0, 1, 2)]  # one step does not fill the memory

    def replies(order: Sequence[Task]) -> dict[int, Reply]:
        return {reply.client: reply for reply in backend.run(order, server, {}, Callback())}

    forward, backward, alone = replies(tasks), replies(tasks[::-1]), replies(tasks[2:])
    for client in (0, 1, 2):
        assert torch.equal(forward[client].payload["centroids"], backward[client].payload["centroids"])
        assert torch.equal(forward[client].model.params, backward[client].model.params)
        assert forward[client].payload["centroids"].shape == (4, 16)
    assert torch.equal(forward[2].payload["centroids"], alone[2].payload["centroids"])
    assert not forward[2].memory


@dataclass
class Recorder:
    """Passes everything on, and keeps it."""

    backend: Backend
    seen: list[tuple[Sequence[Task], ServerState, list[Reply]]] = field(default_factory=list)

    def run(
        self, tasks: Sequence[Task], server: ServerState, memories: Mapping[int, Memory], observer: Observer
    ) -> Iterator[Reply]:
        replies = list(self.backend.run(tasks, server, memories, observer))
        self.seen.append((tasks, server, sorted(replies, key=lambda reply: reply.client)))
        yield from replies


@pytest.mark.parametrize("settings", [[], ["optimizer.name=adamw"], ["byol.target=local"]], ids=str)
def test_round_zero_trains_nothing_and_gives_the_first_clusters(micro: Experiment, settings: list[str]) -> None:
    experiment = _with(micro, *settings)
    backend, state, examples = _setting(experiment)
    recorder = Recorder(backend)
    method = build(experiment)
    after, _ = play_round(state, method, recorder, examples, Callback())
    (prelude, empty, replies), (_, first, _) = recorder.seen
    assert [(task.round, task.steps, task.lr) for task in prelude] == [(0, 2, 0.0)] * 3  # 48 rows, batches of 32
    assert not empty.extra
    assert all(torch.equal(reply.model.params, state.server.model.params) for reply in replies)
    # What the clients begin the first round with is the untrained model, bit for bit, and clusters of unit length.
    fresh = initial_state(method, "cpu").server.model
    assert torch.equal(first.model.params, fresh.params)
    assert torch.equal(first.model.buffers, fresh.buffers)
    assert not torch.equal(after.server.model.params, fresh.params)
    centroids = first.extra["centroids"]
    assert torch.allclose(centroids.norm(dim=1), torch.ones(8), atol=1e-5)
    points = torch.cat([reply.payload["centroids"] for reply in replies])
    assert points.shape == (12, 16)
    assert torch.allclose(points.norm(dim=1), torch.ones(12), atol=1e-5)
    start = initial_clusters(points, 8, generator("cpu", experiment.seed, "global clusters"))
    assert torch.equal(centroids, global_clusters(start, points, steps=20, temperature=0.1))


def test_the_server_goes_on_from_its_clusters(micro: Experiment) -> None:
    experiment = _with(micro, "orchestra.server_steps=7", "orchestra.temperature=0.3")
    backend, state, examples = _setting(experiment)
    recorder = Recorder(backend)
    after, record = play_round(state, build(experiment), recorder, examples, Callback())
    _, server, replies = recorder.seen[1]
    points = torch.cat([reply.payload["centroids"] for reply in replies])
    expected = global_clusters(server.extra["centroids"], points, steps=7, temperature=0.3)
    assert torch.equal(after.server.extra["centroids"], expected)
    assert record["orchestra.clustering"] == pytest.approx(float(clustering_loss(expected, points, 0.3)))
    assert -1 <= record["orchestra.clustering"] < 0
    mean = sum(reply.examples * reply.model.params.double() for reply in replies) / sum(examples)
    assert torch.allclose(after.server.model.params.double(), mean, atol=1e-6)
    _, later = play_round(after, build(experiment), backend, examples, Callback())
    assert later["bytes_up"] - later["bytes_down"] == 4 * 3 * 16 * (4 - 8)  # L up, G down


@dataclass(frozen=True)
class Watched(OrchestraMethod):
    """Notes the online and the target parameters whenever the loss is computed."""

    uses: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def outcome(self, learner: Objective, batch: Batch, generator: torch.Generator) -> Outcome:
        assert isinstance(learner, Orchestra)
        online = torch.cat(
            [p.detach().flatten() for p in [*learner.encoder.parameters(), *learner.projector.parameters()]]
        )
        self.uses.append((online.clone(), torch.cat([p.flatten() for p in learner.target.parameters()])))
        return super().outcome(learner, batch, generator)


def _watched(experiment: Experiment, rounds: int) -> tuple[list[tuple[Tensor, Tensor]], list[FederationState]]:
    """The uses of the target by 3 clients in 3 steps a round, without those of the prelude, and the states between."""
    plain = build(experiment)
    method = Watched(experiment, plain.aggregator, stays=plain.stays, scratch=plain.scratch, prelude=plain.prelude)
    dataset = load_dataset(experiment.dataset, experiment.data)
    shares = make_partition(dataset, experiment)
    backend, states = LocalBackend(method, dataset.train, shares), [initial_state(method, "cpu")]
    for _ in range(rounds):
        states.append(play_round(states[-1], method, backend, [len(share) for share in shares], Callback())[0])
    prelude = 3 * method.prelude
    for online, target in method.uses[:prelude]:
        assert torch.equal(online, target)
    return method.uses[prelude:], states


@pytest.mark.parametrize("momentum", [0.6, 0.0])
def test_a_travelling_target_moves_as_in_the_authors_code(micro: Experiment, momentum: float) -> None:
    """There it moves before each use, toward the online network of that moment, and is averaged as it was used last."""
    experiment = _with(micro, f"orchestra.momentum={momentum}", "client_weights=uniform")
    uses, _ = _watched(experiment, rounds=2)
    assert len(uses) == 2 * 3 * 3
    begin = uses[0][0].double()  # target = online
    for round_ in range(2):
        ends = []
        for client in range(3):
            target = begin
            for step in range(3):
                online, used = uses[9 * round_ + 3 * client + step]
                target = momentum * target + (1 - momentum) * online.double()
                assert torch.allclose(used.double(), target, atol=1e-6)
                if step and momentum:
                    assert not torch.allclose(online.double(), target, atol=1e-4)
            ends.append(target)
        begin = sum(ends) / 3


def test_a_target_that_stays_moves_when_the_model_arrives(micro: Experiment) -> None:
    experiment = _with(micro, "byol.target=local", "orchestra.momentum=0.6")
    uses, states = _watched(experiment, rounds=2)
    for client in range(3):
        for round_ in range(2):
            first, *others = uses[9 * round_ + 3 * client :][:3]
            kept = _remembered_target(experiment, states[1].memories[client]) if round_ else first[0]
            target = 0.6 * kept + 0.4 * first[0]
            assert torch.allclose(first[1], target, atol=1e-6)
            assert torch.equal(first[1], kept) == (round_ == 0)
            for online, used in others:
                target = 0.6 * target + 0.4 * online
                assert torch.allclose(used, target, atol=1e-6)


def _remembered_target(experiment: Experiment, memory: Memory) -> Tensor:
    """In the order in which the learner lists its tensors; in memory the kernels of convolutions lie channels last."""
    model = FlatModel(build(experiment).learner())
    model.section("target").params.copy_(memory["target.params"])
    return torch.cat([p.flatten() for p in model.module.target.parameters()])


# Whole runs.


def _weights(path: Path) -> bytes:
    newest = max((path / "checkpoint").glob("round-*"))
    return b"".join(file.name.encode() + file.read_bytes() for file in sorted(newest.glob("*.safetensors")))


def test_clusters_survive_a_resume_bit_for_bit(micro: Experiment, tmp_path: Path) -> None:
    micro = _with(micro, "evaluation.every=1")  # the same rounds are judged, so the best one is the same
    experiment = _with(micro, "rounds=3")
    whole = fedu2.train(experiment, tmp_path / "whole")
    fedu2.train(experiment.with_(rounds=1), tmp_path / "cut")
    early = load_file(tmp_path / "cut" / "checkpoint" / "round-000001" / "server.safetensors")["extra/centroids"]
    resumed = fedu2.train(experiment, tmp_path / "cut", resume=True)
    assert _weights(resumed.path) == _weights(whole.path)
    late = load_file(whole.path / "checkpoint" / "round-000003" / "server.safetensors")["extra/centroids"]
    assert early.shape == late.shape == (8, 16)
    assert not torch.equal(early, late)
    assert not list((whole.path / "checkpoint" / "round-000003").glob("client-*"))
    assert [record["orchestra.clustering"] for record in resumed.history[1:]] == [
        record["orchestra.clustering"] for record in whole.history[1:]
    ]


@pytest.mark.parametrize("target", ["shared", "local", "fresh"])
def test_partial_participation(micro: Experiment, target: str) -> None:
    """One client of three in the prelude and in each round."""
    experiment = _with(micro, "participation=0.4", f"byol.target={target}")
    backend, state, examples = _setting(experiment)
    recorder, seen = Recorder(backend), set()
    for _ in range(4):
        state, record = play_round(state, build(experiment), recorder, examples, Callback())
        (client,) = record["clients"]
        seen.add(client)
        assert math.isfinite(record["loss"])
        assert set(state.memories) == (seen if target == "local" else set())
    assert len(seen) > 1
    assert [len(replies) for _, _, replies in recorder.seen] == [1] * 5


def test_clients_smaller_than_a_batch(micro: Experiment, tmp_path: Path) -> None:
    partition = tmp_path / "partition.json"
    partition.write_text(json.dumps([[0, 1], list(range(2, 10)), list(range(10, 80))]))
    experiment = _with(
        micro, "partition=file", f"split.file={partition}", "local_steps=epochs", "local_epochs=1", "orchestra.memory=4"
    )
    run = fedu2.train(experiment, tmp_path / "run")
    assert math.isfinite(run.history[-1]["loss"])
    centroids = load_file(run.path / "checkpoint" / "round-000002" / "server.safetensors")["extra/centroids"]
    assert torch.allclose(centroids.norm(dim=1), torch.ones(8), atol=1e-5)


def test_rotation_is_part_of_it_and_can_be_left_out(micro: Experiment) -> None:
    experiment = _with(micro)
    assert experiment.rotation.weight == 1
    assert experiment.byol.target == "shared"
    record = _first_round(experiment)
    assert record["loss"] == pytest.approx(record["align"] + record["rotation"], rel=1e-5)
    record = _first_round(_with(micro, "rotation.weight=0"))
    assert "rotation" not in record
    assert record["loss"] == pytest.approx(record["align"])


def test_training_lowers_the_cluster_loss(micro: Experiment) -> None:
    still = "rotation.weight=0", "orchestra.momentum=1"
    short = _first_round(_with(micro, "local_steps=1", *still))["align"]
    long = _first_round(_with(micro, "local_steps=15", *still))["align"]
    assert long < short - 0.02


def _first_round(experiment: Experiment) -> dict[str, Any]:
    backend, state, examples = _setting(experiment)
    return play_round(state, build(experiment), backend, examples, Callback())[1]
