"""A federation over Flower's messages, in one process: parity with the local backend, faults, and what travels."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

pytest.importorskip("flwr")

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict

import fedu2
from fedu2.errors import TrainingError, UsageError
from fedu2.experiment import Experiment
from fedu2.federation.callbacks import Callback
from fedu2.federation.flower import backend as flower_backend
from fedu2.federation.flower.client_app import app
from fedu2.federation.flower.server import serve
from fedu2.federation.flower.server_app import experiment_of
from fedu2.methods import build
from flower_grid import LocalGrid

CLOCKS = ("seconds", "samples_per_second", "evaluation_seconds")


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flower_backend, "PAUSE", 0.01)


def _partitions(count: int, **more: Any) -> dict[int, dict[str, Any]]:
    return {100 + k: {"partition-id": k, **more} for k in range(count)}


def _weights(run: fedu2.Run) -> dict[str, torch.Tensor]:
    return run.learner().state_dict()


def _same(one: fedu2.Run, other: fedu2.Run) -> bool:
    ours, theirs = _weights(one), _weights(other)
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


METHODS = [("fedu2", "byol"), ("fedema", "byol"), ("orchestra", "orchestra"), ("fedbyol", "byol"), ("fedu", "byol"),
           ("fedx", "simclr"), ("ssd", "alignuniform"), ("ldawa", "simsiam"), ("feddecorr", "simclr")]  # fmt: skip


@pytest.mark.parametrize(("method", "objective"), METHODS)
def test_the_global_model_is_that_of_the_local_backend(
    micro: Experiment, tmp_path: Path, method: str, objective: str
) -> None:
    experiment = micro.with_(method=method, objective=objective, rounds=2)
    local = fedu2.train(experiment, tmp_path / "local")
    over = serve(LocalGrid(app, _partitions(3)), experiment, tmp_path / "flower")
    assert _same(over, local)
    ours, theirs = (
        [{k: v for k, v in line.items() if k not in CLOCKS} for line in r.history[1:]] for r in (over, local)
    )
    for mine, other in zip(ours, theirs, strict=True):
        assert {k: mine[k] for k in ("round", "loss", "clients", "client_loss", "bytes_down", "bytes_up", "samples")
                if k in mine} == {k: other[k] for k in mine if k in other and k in (
                    "round", "loss", "clients", "client_loss", "bytes_down", "bytes_up", "samples")}  # fmt: skip


def test_a_server_that_was_killed_goes_on(micro: Experiment, tmp_path: Path) -> None:
    """Killed after a round, with sites that keep their memories on disk; FedEMA remembers its encoder and its scale."""
    experiment = micro.with_(method="fedema", rounds=3, checkpoint_every=1)
    whole = serve(LocalGrid(app, _partitions(3)), experiment, tmp_path / "whole")

    class Killed(BaseException):
        pass

    def kill_in_round_two(node: int, question: Message, answer: Message) -> Message:
        task = question.content.config_records.get("task")
        if question.metadata.message_type == "train.task" and task["round"] == 2 and node == 101:
            raise Killed  # two sites have trained and written their memories; the server knows of none
        return answer

    nodes = _partitions(3, memory=str(tmp_path / "memories"))
    for k in range(3):
        nodes[100 + k]["memory"] = str(tmp_path / f"memory-{k}")
    with pytest.raises(Killed):
        serve(LocalGrid(app, nodes, kill_in_round_two), experiment, tmp_path / "run")
    resumed = serve(LocalGrid(app, nodes), experiment, tmp_path / "run")  # a new Flower run: contexts are empty
    assert _same(resumed, whole)
    assert [line["round"] for line in resumed.history] == [0, 1, 2, 3]
    with pytest.raises(UsageError, match="is finished"):
        serve(LocalGrid(app, nodes), experiment, tmp_path / "run")


def test_half_precision_on_the_way(micro: Experiment, tmp_path: Path) -> None:
    grids = {half: LocalGrid(app, _partitions(3)) for half in (False, True)}
    runs = {
        half: serve(grid, micro.with_(flower__half=half, rounds=1), tmp_path / str(half))
        for half, grid in grids.items()
    }
    start = fedu2.Run(tmp_path / "False").experiment
    initial = build(start).learner().state_dict()
    exact, rounded = _weights(runs[False]), _weights(runs[True])
    moved = torch.cat([(exact[n] - initial[n]).flatten() for n in exact if exact[n].is_floating_point()]).norm()
    apart = torch.cat([(exact[n] - rounded[n]).flatten() for n in exact if exact[n].is_floating_point()]).norm()
    assert 0 < apart < 0.2 * moved
    sizes = {half: _bytes(grid, "train.task") for half, grid in grids.items()}
    assert sizes[True] < 0.6 * sizes[False]


def _bytes(grid: LocalGrid, kind: str) -> int:
    messages = [m for _, _, m in grid.seen if m.metadata.message_type == kind]
    return sum(len(a.data) for m in messages for record in m.content.array_records.values() for a in record.values())


# What travels


def _pictures(folder: Path, classes: int, count: int, seed: int) -> Path:
    noise = np.random.default_rng(seed)
    for label in range(classes):
        (folder / f"secret-class-{label}").mkdir(parents=True)
        for i in range(count):
            pixels = noise.integers(0, 256, (20, 20, 3), dtype=np.uint8) // 2 + 60 * label
            Image.fromarray(pixels.astype(np.uint8)).save(folder / f"secret-class-{label}" / f"patient-{i}.png")
    return folder


def test_sites_with_images_of_their_own(micro: Experiment, tmp_path: Path) -> None:
    """Nothing but declared arrays, numbers and words travels: no pixel, no label, no path, no file name."""
    folders = [_pictures(tmp_path / f"hospital-{k}", 2, 12 + k, k) for k in range(2)]
    nodes = {7: {"data": str(folders[0]), "site": "north"}, 8: {"data": str(folders[1]), "site": "south"}}
    grid = LocalGrid(app, nodes)
    experiment = micro.with_(dataset="folder", rounds=2, data__holdout=0.25, evaluation__every=1)
    run = serve(grid, experiment, tmp_path / "run")
    assert json.loads((run.path / "sites.json").read_text())["clients"] == {"north": 0, "south": 1}
    assert run.history[-1]["clients"] == [0, 1]
    assert 0 <= run.history[-1]["knn"] <= 100  # judged at the sites
    allowed = {
        "query.describe": ({"ask"}, {"site"}),
        "train.task": ({"model", "extra", "task"}, {"model", "payload", "reply", "metrics"}),
        "query.judge": ({"model", "extra", "task"}, {"metrics"}),
    }
    for direction, _, message in grid.seen:
        down, up = allowed[message.metadata.message_type]
        assert set(message.content) == (down if direction == "down" else up)
        for record in message.content.array_records.values():
            assert set(record) <= {"params", "buffers"}
        words = str({**message.content.config_records, **message.content.metric_records})
        for secret in ("secret-class", "patient", str(tmp_path), "hospital"):
            assert secret not in words
    replies = [m for d, _, m in grid.seen if d == "up" and m.metadata.message_type == "train.task"]
    assert {name for m in replies for name in m.content.config_records["reply"]} == {"format", "examples", "samples"}


def test_sites_need_no_labels(micro: Experiment, tmp_path: Path) -> None:
    for k in range(2):
        (tmp_path / f"site-{k}").mkdir()
        for i in range(10):
            Image.effect_noise((20, 20), 30 + i).convert("RGB").save(tmp_path / f"site-{k}" / f"{i}.png")
    nodes = {k: {"data": str(tmp_path / f"site-{k}")} for k in range(2)}
    run = serve(LocalGrid(app, nodes), micro.with_(dataset="folder", rounds=1), tmp_path / "run")
    assert "knn" not in run.history[-1]
    assert run.history[-1]["loss"] > 0


def test_the_servers_own_labelled_images(micro: Experiment, tmp_path: Path) -> None:
    grid = LocalGrid(app, _partitions(3))
    run = serve(grid, micro.with_(flower__server_data="sample", rounds=1), tmp_path / "run")
    local = fedu2.train(micro.with_(rounds=1), tmp_path / "local")
    assert run.history[-1]["knn"] == local.history[-1]["knn"]
    assert all(m.metadata.message_type != "query.judge" for _, _, m in grid.seen)


# Faults


def _reply_with(message: Message, **changes: Any) -> Message:
    content = RecordDict({**message.content, **changes})
    return Message(content, metadata=message.metadata)


def _spoiled(kind: str, answer: Message) -> Message | None:
    params = answer.content.array_records["model"]["params"].numpy().copy()
    buffers = answer.content.array_records["model"]["buffers"]

    def model(vector: Any) -> ArrayRecord:
        return ArrayRecord({"params": Array(vector), "buffers": buffers})

    if kind == "silence":
        return None
    if kind == "nan":
        params[3] = np.nan
        return _reply_with(answer, model=model(params))
    if kind == "shape":
        return _reply_with(answer, model=model(params[:-1]))
    if kind == "type":
        return _reply_with(answer, model=model(params.astype(np.float64)))
    if kind == "names":
        return _reply_with(answer, model=ArrayRecord({"weights": Array(params)}))
    if kind == "loss":
        return _reply_with(answer, metrics=MetricRecord({"loss": float("nan")}))
    if kind == "examples":
        return _reply_with(answer, reply=ConfigRecord({"format": 1, "examples": -5, "samples": 1}))
    if kind == "garbage":
        return Message(RecordDict({"x": ConfigRecord({"y": 1})}), metadata=answer.metadata)
    raise AssertionError(kind)


REASONS = {
    "silence": "it did not answer in time",
    "nan": "its params are not finite",
    "shape": "its params are torch.float32",
    "type": "its params are torch.float64",
    "names": "its model has weights in place of params and buffers",
    "loss": "its loss is missing or not finite",
    "examples": "it claims -5 images",
    "garbage": "its reply is not one",
}


@pytest.mark.parametrize("kind", REASONS)
def test_a_round_goes_on_without_what_is_not_valid(micro: Experiment, tmp_path: Path, kind: str) -> None:
    def spoil(node: int, question: Message, answer: Message) -> Message | None:
        hit = node == 101 and question.metadata.message_type == "train.task"
        return _spoiled(kind, answer) if hit else answer

    experiment = micro.with_(rounds=1, flower__timeout=0.3)
    run = serve(LocalGrid(app, _partitions(3), spoil), experiment, tmp_path / "run")
    record = run.history[-1]
    assert record["clients"] == [0, 2]
    assert REASONS[kind] in record["left_out"]["1"]
    assert len(record["eua.weights"]) == 2


def test_too_few_replies_stop_the_run_with_its_state_saved(micro: Experiment, tmp_path: Path) -> None:
    def spoil(node: int, question: Message, answer: Message) -> Message | None:
        task = question.content.config_records.get("task")
        broken = question.metadata.message_type == "train.task" and task["round"] == 2 and node > 100
        return _spoiled("nan", answer) if broken else answer

    experiment = micro.with_(rounds=3, checkpoint_every=10)
    with pytest.raises(TrainingError, match=r"round 2 has 1 valid replies, fewer than 2 .*client 1: its params"):
        serve(LocalGrid(app, _partitions(3), spoil), experiment, tmp_path / "run")
    assert fedu2.Run(tmp_path / "run").rounds_played == 1
    done = serve(LocalGrid(app, _partitions(3)), experiment, tmp_path / "run")
    assert done.history[-1]["round"] == 3


def test_sites_come_and_go(micro: Experiment, tmp_path: Path) -> None:
    experiment = micro.with_(rounds=3)
    grid = LocalGrid(app, _partitions(3))
    grid.connected = {100, 101}

    class Watch(Callback):
        def on_round(self, record: Any) -> None:
            grid.connected = {1: {100, 101, 102}, 2: {100, 102}}.get(record["round"], grid.connected)

    run = serve(grid, experiment, tmp_path / "run", callbacks=[Watch()])
    assert [line["clients"] for line in run.history[1:]] == [[0, 1], [0, 1, 2], [0, 2]]


def test_a_site_that_dies_in_the_middle_of_a_round(micro: Experiment, tmp_path: Path) -> None:
    def crash(node: int, question: Message, answer: Message) -> Message:
        if node == 102 and question.metadata.message_type == "train.task":
            from flwr.app import Error

            return Message(Error(code=3, reason="Node Unavailable"), reply_to=question)
        return answer

    run = serve(LocalGrid(app, _partitions(3), crash), micro.with_(rounds=1), tmp_path / "run")
    assert run.history[-1]["left_out"] == {"2": "it failed: Node Unavailable"}


def test_too_few_sites(micro: Experiment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedu2.federation.flower.server.LOOK", 0.01)
    experiment = micro.with_(flower__min_sites=4, flower__patience=0.1)
    with pytest.raises(TrainingError, match=r"3 sites are connected, and flower\.min_sites=4 are needed"):
        serve(LocalGrid(app, _partitions(3)), experiment, tmp_path / "run")


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({}, "trouble with its configuration"),
        ({"data": "/nonexistent/folder"}, "trouble with its images"),
        ({"partition-id": 9}, "trouble with its images"),
        ({"partition-id": 1}, "another node is site partition-1 already"),
    ],
)
def test_nodes_that_are_no_sites_are_left_out(
    micro: Experiment, tmp_path: Path, config: dict[str, Any], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    nodes = {**_partitions(3), 500: config}
    run = serve(LocalGrid(app, nodes), micro.with_(rounds=1), tmp_path / "run")
    assert run.history[-1]["clients"] == [0, 1, 2]
    assert f"node 500 is left out: {'' if 'another' in reason else 'it has '}{reason}" in caplog.text
    assert "/nonexistent" not in str([str(m) for _, _, m in LocalGrid(app, {}).seen])


def test_the_apps_configuration_is_an_experiment() -> None:
    flat = {"method": "fedema", "fur.weight": 0.5, "views.crop_scale": "[0.2, 1.0]", "flower.half": True, "rounds": 7}
    experiment = experiment_of(flat)
    assert (experiment.method, experiment.fur.weight, experiment.rounds) == ("fedema", 0.5, 7)
    assert experiment.views.crop_scale == (0.2, 1.0)
    assert experiment.flower.half


def test_arrays_are_plain() -> None:
    """No pickle: what arrives can be read with allow_pickle=False."""
    from fedu2.federation.flower.wire import pack_tensors, unpack_tensors

    record = pack_tensors({"a": torch.arange(4), "b": torch.randn(3, 2)}, half=("b",))
    for array in record.values():
        np.load(io.BytesIO(array.data), allow_pickle=False)
    back = unpack_tensors(record)
    assert torch.equal(back["a"], torch.arange(4))
    assert back["b"].dtype == torch.float32
