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

from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict

import fedu2
from fedu2.errors import TrainingError, UsageError
from fedu2.experiment import Experiment
from fedu2.federation.callbacks import Callback
from fedu2.federation.flower import backend as flower_backend
from fedu2.federation.flower import client_app
from fedu2.federation.flower.client_app import app
from fedu2.federation.flower.init import experiment_of
from fedu2.federation.flower.server import LOOK, serve
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
    # What follows a schedule needs to be told at the sites how far the run is; and what is sent lies ahead of θ_g.
    schedules = {"optimizer__schedule": "cosine", "fur__schedule": "cosine", "fur__until": 1}
    steps = {"server__lr": 2, "server__until": 0.5, "orchestra__server_steps": 20}
    experiment = micro.with_(method=method, objective=objective, rounds=2, **schedules, **steps)
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
    with pytest.raises(UsageError, match="is finished, after round 3: raise rounds"):
        serve(LocalGrid(app, nodes), experiment, tmp_path / "run")
    longer = serve(LocalGrid(app, nodes), experiment.with_(rounds=4), tmp_path / "run")
    assert [line["round"] for line in longer.history] == [0, 1, 2, 3, 4]


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
    for half, run in runs.items():  # what is logged is what travelled, but for the headers of arrays
        last = run.history[-1]
        assert last["bytes_down"] + last["bytes_up"] == pytest.approx(sizes[half], rel=0.05)


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
    nodes = {7: {"data": str(folders[0]), "site": "north"}, 8: {"data": str(folders[1])}}
    grid = LocalGrid(app, nodes)
    own = _pictures(tmp_path / "hospital-server", 2, 6, 9)
    experiment = micro.with_(dataset="folder", rounds=2, data__holdout=0.5, evaluation__every=1, data__root=str(own))
    run = serve(grid, experiment, tmp_path / "run")
    assert json.loads((run.path / "sites.json").read_text())["clients"] == {"north": 0, "site-8": 1}
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


@pytest.mark.parametrize("harm", ["gone", "empty", "other number"])
def test_a_server_does_not_go_on_without_its_roster(micro: Experiment, tmp_path: Path, harm: str) -> None:
    """With other numbers the sites would draw other views and meet other memories, and nobody would notice."""
    grid = LocalGrid(app, _partitions(3))
    run = serve(grid, micro.with_(rounds=1), tmp_path / "run")
    roster = run.path / "sites.json"
    text = roster.read_text()
    spoilt = {"empty": "", "other number": text.replace(": 2", ": 5")}.get(harm)
    assert spoilt != text
    roster.unlink() if spoilt is None else roster.write_text(spoilt)
    with pytest.raises(TrainingError, match=r"sites\.json is damaged or missing"):
        serve(grid, micro.with_(rounds=2), tmp_path / "run")


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


@pytest.mark.parametrize(
    ("told", "reason"),
    [
        ({"knn": 100.0}, "does not say what it measured"),
        ({"knn": float("nan"), "tested": 10}, "what it measured cannot be"),
        ({"knn": 50.0, "tested": -3}, "what it measured cannot be"),
    ],
)
def test_figures_that_cannot_be_are_not_taken(
    micro: Experiment, tmp_path: Path, told: dict[str, float], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    def spoil(node: int, question: Message, answer: Message) -> Message:
        if node != 101 or question.metadata.message_type != "query.judge":
            return answer
        others = {"effective_rank": 1.0, "projector_rank": 1.0, "alignment": 0.0, "uniformity": 0.0, "round": 99.0}
        return _reply_with(answer, metrics=MetricRecord({**others, **told}))

    run = serve(LocalGrid(app, _partitions(3), spoil), micro.with_(rounds=1), tmp_path / "run")
    assert f"node 101 judges nothing: {'it ' * ('does' in reason)}{reason}" in caplog.text
    assert run.history[-1]["round"] == 1
    assert 0 <= run.history[-1]["knn"] < 100


def test_a_copy_of_another_sites_model_is_left_out(micro: Experiment, tmp_path: Path) -> None:
    sent: dict[int, Any] = {}

    def copy(node: int, question: Message, answer: Message) -> Message:
        if question.metadata.message_type != "train.task" or node == 100:
            return answer
        model = sent.setdefault(question.content.config_records["task"]["round"], answer.content.array_records["model"])
        return _reply_with(answer, model=model)

    run = serve(LocalGrid(app, _partitions(3), copy), micro.with_(rounds=1), tmp_path / "run")
    assert run.history[-1]["left_out"] == {"2": "its model is that of client 1"}
    assert run.summary["left_out"] == {"2": {"its model is that of client 1": 1}}


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
    assert run.history[-1]["left_out"] == {"2": "it failed, and Flower's code for it is 3"}


def test_too_few_sites(
    micro: Experiment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("fedu2.federation.flower.server.LOOK", 0.01)
    experiment = micro.with_(flower__min_sites=4, flower__patience=0.1)
    with caplog.at_level("INFO"), pytest.raises(TrainingError, match=r"connected: 3, needed: 4 .* after 0.1 seconds"):
        serve(LocalGrid(app, _partitions(3)), experiment, tmp_path / "run")
    assert "waiting for sites; sites connected: 3, needed: 4" in caplog.text


def test_nobody_is_waited_for_where_all_nodes_are_refused(micro: Experiment, tmp_path: Path) -> None:
    """As when an app whose images are the sites' is simulated: no node has any."""
    nodes: dict[int, dict[str, Any]] = {100: {}, 101: {}}
    with pytest.raises(TrainingError, match="every node that is there was left out"):
        serve(LocalGrid(app, nodes), micro.with_(flower__patience=1e6), tmp_path / "run")


def test_waiting_for_the_first_sites_is_no_part_of_a_round(
    micro: Experiment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    grid = LocalGrid(app, _partitions(3))
    grid.connected = set()
    looks: list[float] = []

    def look(seconds: float) -> None:
        looks.append(seconds)
        grid.connected = {100, 101, 102} if len(looks) > 4 else set()

    monkeypatch.setattr("fedu2.federation.flower.server.time.sleep", look)

    class Watch(Callback):
        def on_start(self, *_: Any) -> None:
            looks.append(-1)

    serve(grid, micro.with_(rounds=1), tmp_path / "run", callbacks=[Watch()])
    assert looks == [LOOK] * 5 + [-1]


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
    grid = LocalGrid(app, nodes)
    run = serve(grid, micro.with_(rounds=1), tmp_path / "run")
    assert run.history[-1]["clients"] == [0, 1, 2]
    assert f"node 500 is left out: {'' if 'another' in reason else 'it has '}{reason}" in caplog.text
    answers = [
        str(dict(m.content.config_records)) for direction, node, m in grid.seen if (direction, node) == ("up", 500)
    ]
    assert answers
    assert not any("/nonexistent" in answer for answer in answers)


def test_a_node_that_was_refused_is_asked_again(
    micro: Experiment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A site that was mended, and comes back with the same key, has the same node id."""
    monkeypatch.setattr(flower_backend, "AGAIN", 0.0)
    grid = LocalGrid(app, {**_partitions(2), 500: {"data": "/nonexistent"}})

    class Mend(Callback):
        def on_round(self, record: Any) -> None:
            if record["round"] == 1:
                grid.contexts[500].node_config = {"partition-id": 2}

    run = serve(grid, micro.with_(rounds=2), tmp_path / "run", callbacks=[Mend()])
    assert [line["clients"] for line in run.history[1:]] == [[0, 1], [0, 1, 2]]


@pytest.mark.parametrize("names", [["alpha", "partition-0"], ["partition-0", "partition-00"], ["partition-²"]])
def test_no_name_takes_the_number_of_another(names: list[str]) -> None:
    roster = flower_backend.Roster()
    numbers = [roster.admit(flower_backend.SiteCard(name, node, 10, False)) for node, name in enumerate(names)]
    assert len(set(numbers)) == len(names)
    assert [roster.admit(flower_backend.SiteCard(name, 50, 10, False)) for name in names] == numbers


@pytest.mark.parametrize("name", ["x" * 65, "a\nfedu2: finished", "\x1b[2J", ""])
def test_names_that_forge_logs_are_refused(
    micro: Experiment, tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    def spoil(node: int, question: Message, answer: Message) -> Message:
        if node == 101 and question.metadata.message_type == "query.describe":
            answer.content.config_records["site"]["name"] = name
        return answer

    experiment = micro.with_(rounds=1)
    run = serve(LocalGrid(app, _partitions(3), spoil), experiment, tmp_path / "run")
    assert run.history[-1]["clients"] == [0, 2]
    assert "cannot be printed" in caplog.text


@pytest.mark.parametrize("name", ["round", "clients", "left_out", "a b"])
def test_figures_of_a_site_do_not_become_the_servers(micro: Experiment, tmp_path: Path, name: str) -> None:
    def spoil(node: int, question: Message, answer: Message) -> Message:
        if node == 101 and question.metadata.message_type == "train.task":
            answer.content.metric_records["metrics"][name] = 12057
        return answer

    run = serve(LocalGrid(app, _partitions(3), spoil), micro.with_(rounds=1), tmp_path / "run")
    record = run.history[-1]
    assert (record["round"], record["clients"]) == (1, [0, 2])
    assert record["left_out"] == {"1": "it calls a term of its loss what none is called"}


def test_what_nobody_foresaw_names_no_file(micro: Experiment, tmp_path: Path) -> None:
    """A memory that cannot be written fails with a sentence of the system's, which names the path."""
    (tmp_path / "afile").write_text("x")
    nodes = _partitions(3)
    nodes[101]["memory"] = str(tmp_path / "afile" / "clinic-of-dr-x")
    grid = LocalGrid(app, nodes)
    run = serve(grid, micro.with_(method="fedema", rounds=1), tmp_path / "run")
    assert run.history[-1]["left_out"] == {"1": "it has trouble with its training; its own log says more"}
    assert "clinic" not in (run.path / "metrics.jsonl").read_text()
    assert not any("clinic" in str(m.content) for d, _, m in grid.seen if d == "up" and m.has_content())


def test_memories_reach_back_as_far_as_checkpoints(micro: Experiment, tmp_path: Path) -> None:
    every = 3
    experiment = micro.with_(method="fedema", rounds=2 * every + 1, checkpoint_every=every)
    whole = serve(LocalGrid(app, _partitions(3)), experiment, tmp_path / "whole")

    class Killed(BaseException):
        pass

    def kill(node: int, question: Message, answer: Message) -> Message:
        task = question.content.config_records.get("task")
        if question.metadata.message_type == "train.task" and task["round"] == 2 * every and node == 101:
            raise Killed
        return answer

    nodes = _partitions(3, memory=str(tmp_path / "memory"))  # one folder for all: sites do not mix theirs
    with pytest.raises(Killed):
        serve(LocalGrid(app, nodes, kill), experiment, tmp_path / "run")
    assert _same(serve(LocalGrid(app, nodes), experiment, tmp_path / "run"), whole)


def test_what_was_trained_is_kept_when_all_sites_leave_before_the_judging(micro: Experiment, tmp_path: Path) -> None:
    grid = LocalGrid(app, _partitions(3))

    def leave(node: int, question: Message, answer: Message) -> Message:
        task = question.content.config_records.get("task")
        if question.metadata.message_type == "train.task" and task["round"] == 2 and node == 102:
            grid.connected = set()
        return answer

    grid.spoil = leave
    run = serve(grid, micro.with_(rounds=2, evaluation__every=1), tmp_path / "run")
    assert run.rounds_played == 2
    assert "knn" not in run.history[-1]


def test_a_site_may_decline_to_judge_and_tells_nothing_of_single_images(micro: Experiment, tmp_path: Path) -> None:
    nodes = {
        7: {"data": str(_pictures(tmp_path / "a", 2, 20, 0)), "judge": False},
        8: {"data": str(_pictures(tmp_path / "b", 2, 20, 1))},
        9: {"data": str(_pictures(tmp_path / "c", 2, 8, 2))},
    }
    grid = LocalGrid(app, nodes)
    serve(grid, micro.with_(dataset="folder", rounds=1, data__holdout=0.25, evaluation__every=1), tmp_path / "run")
    assert {node for _, node, m in grid.seen if m.metadata.message_type == "query.judge"} == {8}


def test_messages_live_no_longer_than_somebody_waits_for_them(micro: Experiment, tmp_path: Path) -> None:
    grid = LocalGrid(app, _partitions(3))
    serve(grid, micro.with_(rounds=1, flower__timeout=77), tmp_path / "run")
    lives = {m.metadata.ttl for d, _, m in grid.seen if d == "down" and m.metadata.message_type == "train.task"}
    assert lives == {77}


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


def test_shares_of_a_file_are_found_where_the_app_says(micro: Experiment, tmp_path: Path) -> None:
    """Flower hands the app's configuration to sites; the experiment itself names no file to them."""
    (tmp_path / "shares.json").write_text("[[0, 1, 2], [3, 4]]")
    config = {"split.file": str(tmp_path / "shares.json")}
    context = Context(run_id=1, node_id=1, node_config={"partition-id": 1}, state=RecordDict(), run_config=config)
    site, _ = client_app._site(micro.with_(partition="file"), context)
    assert site.share.tolist() == [3, 4]
