"""Sites that lie, and a server that does: what they cannot write, take, claim or reach."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("flwr")

from flwr.app import Array, ConfigRecord, Context, Message, MetricRecord, RecordDict

from fedu2.errors import DataError
from fedu2.experiment import Experiment
from fedu2.federation.callbacks import Callback
from fedu2.federation.flower import backend as flower_backend
from fedu2.federation.flower.backend import FlowerBackend, Roster, _card, _figures, _ranges
from fedu2.federation.flower.client_app import app
from fedu2.federation.flower.wire import Assignment, pack_assignment, pack_reply, unpack_assignment
from fedu2.federation.play import summarise
from fedu2.federation.rounds import initial_state, play_round
from fedu2.methods import Reply, Task, build, resolve
from fedu2.models.flat import ModelState
from flower_grid import LocalGrid, Spoil

FORGED = "x\nfedu2: round 2/2  loss 0.001  kNN 99.9 %\n\x1b[2J\x1b]0;owned\x07"
JUNK = {"junk": Array(np.zeros(3, np.float32))}


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flower_backend, "PAUSE", 0.01)


def _site(message: Message, context: Context) -> Message:
    """A site at once: every parameter moves a little, by the client's number."""
    if message.metadata.message_type == "query.describe":
        told = {"name": f"partition-{context.node_config['partition-id']}", "examples": 10, "judges": False}
        return Message(RecordDict({"site": ConfigRecord(told)}), reply_to=message)
    asked = unpack_assignment(message.content)
    start, client = asked.server.model, asked.task.client
    payload = {}
    if asked.experiment.method == "orchestra":
        random = torch.Generator().manual_seed(client)
        payload["centroids"] = torch.nn.functional.normalize(torch.randn(16, 8, generator=random), dim=1)
    moved = ModelState(start.params + 1e-3 * (client + 1), start.buffers)
    return Message(pack_reply(Reply(client, 10, 10, moved, {}, {"loss": 1.0}, payload), asked), reply_to=message)


def _grid(nodes: int, spoil: Spoil | None = None) -> LocalGrid:
    return LocalGrid(_site, {100 + k: {"partition-id": k} for k in range(nodes)}, spoil)  # type: ignore[arg-type]


def _answer(**records: Any) -> Any:
    """As it comes from a site."""
    return SimpleNamespace(content=RecordDict(records), has_error=lambda: False)


def _played(experiment: Experiment, nodes: int, spoil: Callable[[int, int, RecordDict], object]) -> dict[str, Any]:
    """The record of the first round, of which sites change what they send."""

    def spoiled(node: int, question: Message, answer: Message) -> Message:
        if question.metadata.message_type == "train.task":
            round_ = question.content.config_records["task"]["round"]
            spoil(node, round_, answer.content)  # type: ignore[arg-type]
        return answer

    backend = FlowerBackend(_grid(nodes, spoiled), experiment, "run", Roster())  # type: ignore[arg-type]
    backend.refresh()
    examples = {client: card.examples for client, card in backend.roster.cards.items()}
    method = build(experiment)
    return play_round(initial_state(method, "cpu"), method, backend, examples, Callback())[1]


# What a site says


@pytest.mark.parametrize("name", [FORGED, "A" * 100_000], ids=["forged", "long"])
def test_names_of_arrays_forge_no_log_and_swell_no_record(
    micro: Experiment, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    def spoil(node: int, round_: int, content: RecordDict) -> None:
        if node == 101:
            content.array_records["model"][name] = Array(np.zeros(1, np.float32))

    record = _played(micro, 3, spoil)
    told = record["left_out"]["1"]
    assert told.startswith("its model has ")
    assert told.isprintable()
    assert len(told) < 300
    assert f"client 1 is left out of round 1: {told}" in [line.getMessage() for line in caplog.records]


def test_a_number_that_is_none_forges_no_log(micro: Experiment, caplog: pytest.LogCaptureFixture) -> None:
    def spoil(node: int, question: Message, answer: Message) -> Message:
        answer.content.config_records["site"]["examples"] = 50 * FORGED
        return answer

    FlowerBackend(_grid(1, spoil), micro, "run", Roster()).refresh()  # type: ignore[arg-type]
    (line,) = caplog.messages
    assert line.startswith("node 100 is left out: it does not say who it is")
    assert line.isprintable()
    assert len(line) < 300


def test_a_payload_is_refused_where_the_method_has_none(micro: Experiment) -> None:
    def spoil(node: int, round_: int, content: RecordDict) -> None:
        if node == 101:
            content.array_records["payload"].update(JUNK)

    assert _played(micro, 3, spoil)["left_out"] == {"1": "it sends a payload, and the method has none"}


def test_who_is_left_out_of_the_prelude_is_written_down(micro: Experiment) -> None:
    """Client 1 before the first round, client 2 in it, client 3 in both."""
    hit = {101: (0,), 102: (1,), 103: (0, 1)}

    def spoil(node: int, round_: int, content: RecordDict) -> None:
        if round_ in hit.get(node, ()):
            content.array_records["payload"].update(JUNK)

    record = _played(resolve(micro.with_(method="orchestra", heads__out=8, orchestra__server_steps=3)), 5, spoil)
    why = "its payload is not centroids"
    told = {"1": f"before round 1: {why}", "2": why, "3": f"before round 1: {why}; {why}"}
    assert record["left_out"] == told
    assert record["clients"] == [0, 1, 4]
    counted = summarise([{**record, "seconds": 1, "samples_per_second": 1}])["left_out"]
    assert counted == {client: {reason: 1} for client, reason in told.items()}


SOUND = {"knn": 50.0, "effective_rank": 12.0, "projector_rank": 6.0, "alignment": 0.5, "uniformity": -2.0}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("knn", 9.9e8), ("knn", 100.1), ("knn", -0.1), ("knn", float("nan")), ("effective_rank", -9e8),
        ("effective_rank", 16.1), ("projector_rank", 8.1), ("alignment", 4.1), ("uniformity", -9), ("uniformity", 1),
    ],
)  # fmt: skip
def test_figures_lie_between_their_ends(name: str, value: float) -> None:
    ranges = _ranges(16, 8)

    def told(**changes: float) -> tuple[int, dict[str, float]]:
        return _figures(_answer(metrics=MetricRecord({**SOUND, "tested": 10, **changes})), ranges)

    assert told() == (10, SOUND)
    with pytest.raises(DataError, match=f"what it measured cannot be: {name} is"):
        told(**{name: value})
    for end in ranges[name]:
        assert told(**{name: end})[1][name] == end
    for images in (0, 10**9 + 1):
        with pytest.raises(DataError, match=f"what it measured cannot be: it is of {images} images"):
            told(tested=images)


# What a site claims


class _Asked(Exception):  # noqa: N818 (nothing went wrong)
    """The tasks of a round: nobody trains."""


class _Listener(Callback):
    def on_tasks(self, tasks: Sequence[Task]) -> None:
        raise _Asked([task.steps for task in tasks])


@pytest.mark.parametrize(
    ("claimed", "trusted", "steps"),
    [
        (640, False, [20, 20, 20]),  # twice as many as the others: they make two passes
        (10**9, False, [30, 30, 31_250_000]),  # counts as three times as many
        (10**9, True, [1000, 1000, 31_250_000]),
    ],
)
def test_a_claim_does_not_set_the_pace_of_others(
    micro: Experiment, claimed: int, trusted: bool, steps: list[int]
) -> None:
    experiment = micro.with_(local_steps="equal", local_epochs=1, max_local_epochs=100, last_batch="drop")
    method = build(experiment)
    backend = SimpleNamespace(trusted=trusted)
    with pytest.raises(_Asked) as asked:
        play_round(initial_state(method, "cpu"), method, backend, [320, 320, claimed], _Listener())  # type: ignore[arg-type]
    assert asked.value.args[0] == steps


# What a site is called


def test_a_name_stays_with_its_node_while_that_is_away(
    micro: Experiment, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(flower_backend, "AGAIN", 0.0)

    def spoil(node: int, question: Message, answer: Message) -> Message:
        if node == 102:
            answer.content.config_records["site"]["name"] = "partition-1"
        return answer

    backend = FlowerBackend(_grid(3, spoil), micro, "run", Roster())

    def connected(*nodes: int) -> dict[int, int]:
        backend.grid.connected = set(nodes)  # type: ignore[attr-defined]
        backend.refresh()
        return {client: card.node for client, card in backend.roster.cards.items()}

    assert connected(100, 101) == {0: 100, 1: 101}
    assert connected(100, 102) == {0: 100}
    assert "node 102 is left out: another node is site partition-1 already, node 101" in caplog.text
    assert connected(100, 101, 102) == {0: 100, 1: 101}
    # A server that is started anew knows numbers, and no nodes: a SuperLink may have forgotten them, too.
    backend.roster = Roster(numbers=backend.roster.numbers)
    assert connected(100, 102) == {0: 100, 1: 102}


def test_a_site_that_is_called_by_its_nodes_number_is_that_node() -> None:
    def called(name: str, node: int) -> str:
        return _card(node, _answer(site=ConfigRecord({"name": name, "examples": 10, "judges": False}))).name

    own = 17_034_212_345_678_901_234
    assert called(f"site-{own}", own) == f"site-{own}"
    assert called("site-2", 5) == "site-2"  # people count their sites like this
    with pytest.raises(DataError, match=f"site-{own} is the name of another node"):
        called(f"site-{own}", own + 1)


# What a server asks for


def _assignment(experiment: Experiment, run: str) -> Assignment:
    return Assignment(run, Task(1, 0, 1, 0.1, 0.0), initial_state(build(experiment), "cpu").server, experiment)


BEYOND = ["../../elsewhere", "..", ".", "", "a/b", "/tmp/x", "a\\b", "a\n", "a\0", "a" * 65, "ä"]


@pytest.mark.parametrize("run", BEYOND)
def test_a_federation_whose_name_could_lead_elsewhere_is_refused(micro: Experiment, run: str) -> None:
    sound = _assignment(micro, "0123456789abcdef")
    assert unpack_assignment(pack_assignment(sound)).run == sound.run
    with pytest.raises(DataError, match="the server calls its federation"):
        unpack_assignment(pack_assignment(replace(sound, run=run)))


@pytest.mark.parametrize("run", ["../../elsewhere", "run"])
def test_a_server_writes_nowhere_but_in_the_folder_for_memories(micro: Experiment, tmp_path: Path, run: str) -> None:
    memory = tmp_path / "site" / "memory"
    grid = LocalGrid(app, {100: {"partition-id": 0, "memory": str(memory)}})
    content = pack_assignment(_assignment(micro.with_(method="fedema", aggregator="fedavg"), run))
    (answer,) = _asked(grid, Message(content, dst_node_id=100, message_type="train.task"))
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    if run == "run":
        assert {path.parent for path in written} == {memory / run / "partition-0"}
    else:
        assert not written
        assert answer.content.config_records["error"]["about"] == "images"


def _asked(grid: LocalGrid, *messages: Message) -> Iterator[Message]:
    return iter(grid.pull_messages(grid.push_messages(messages)))
