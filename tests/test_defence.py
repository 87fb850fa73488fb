"""Updates that nobody should trust: what is refused, bounded and outvoted, and that honest ones keep their bits."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from benchmarks import robustness
from benchmarks.hostile import ATTACKS, Hostile
from torch import Tensor

import fedu2
from fedu2.aggregators import Updates
from fedu2.aggregators.eua import eua
from fedu2.defence import Arrivals, selected
from fedu2.defence.bounds import bounded, claims, shortened
from fedu2.defence.inspect import REMEMBERED, fingerprints, inspected, misfit
from fedu2.defence.rules import krum_scores, multi_krum, trimmed
from fedu2.errors import TrainingError
from fedu2.experiment import Experiment
from fedu2.federation.callbacks import Callback
from fedu2.federation.checkpoint import Checkpoints
from fedu2.federation.local import LocalBackend
from fedu2.federation.play import summarise
from fedu2.federation.rounds import FederationState, initial_state, play_round
from fedu2.methods import Method, Reply, ServerState, Task, methods
from fedu2.models.flat import Entry, Layout, ModelState
from fedu2.options import DefenceOptions, EUAOptions
from toy import colours

START = ModelState(torch.zeros(3), torch.ones(2))
COLOURS = [(4, (255, 0, 0)), (4, (0, 255, 0)), (4, (0, 0, 255)), (4, (255, 255, 0)), (4, (0, 255, 255))]
VARIANCES = Layout((Entry("encoder.norm.running_mean", (1,), 0, 1), Entry("encoder.norm.running_var", (1,), 1, 2)))

Spoil = Callable[[Reply, ModelState, int], Reply]


def _reply(client: int, examples: int = 10) -> Reply:
    return Reply(client, examples, examples, START, {}, {"loss": 1.0})


def _arrivals(params: Sequence[Sequence[float]], buffers: Sequence[Sequence[float]] | None = None) -> Arrivals:
    rows = torch.tensor(params)
    beside = torch.tensor(buffers) if buffers is not None else torch.ones(len(rows), 2)
    return Arrivals([_reply(client) for client in range(len(rows))], rows, beside)


class _Spoiling:
    """Clients that are not ours; those in `spoils` send something else than they learned."""

    trusted = False

    def __init__(self, inner: LocalBackend, spoils: Mapping[int, Spoil]) -> None:
        self.inner, self.spoils = inner, spoils

    def run(self, tasks: Sequence[Task], server: ServerState, memories: Mapping, observer: Callback) -> Iterator[Reply]:
        for reply in self.inner.run(tasks, server, memories, observer):
            spoil = self.spoils.get(reply.client)
            yield spoil(reply, server.model, tasks[0].round) if spoil else reply


def _method(**values: object) -> Method:
    settings = {
        "method": "fedbyol", "objective": "toy", "aggregator": "fedavg", "views.recipe": "none",
        "optimizer.momentum": 0.0, "optimizer.weight_decay": 0.0, "optimizer.lr": 0.25, "local_steps": 1,
        "batch_size": 4, "clients": 5, **values,
    }  # fmt: skip
    experiment = Experiment.parse(settings)
    return methods[experiment.method].build(experiment)


def _play(
    spoils: Mapping[int, Spoil], rounds: int = 1, trusted: bool = False, **values: object
) -> tuple[FederationState, list[dict]]:
    images, shares = colours(*COLOURS)
    method = _method(**values)
    backend = _Spoiling(LocalBackend(method, images, shares), spoils)
    backend.trusted = trusted
    state, records = initial_state(method, "cpu"), []
    for _ in range(rounds):
        state, record = play_round(state, method, backend, [len(share) for share in shares], Callback())
        records.append(record)
    return state, records


def _params(change: Callable[[Tensor, Tensor], Tensor]) -> Spoil:
    def spoil(reply: Reply, start: ModelState, round_: int) -> Reply:
        return replace(reply, model=ModelState(change(reply.model.params, start.params), reply.model.buffers))

    return spoil


def _metrics(**metrics: float) -> Spoil:
    return lambda reply, start, round_: replace(reply, metrics={**reply.metrics, **metrics})


# What is refused


BAD: dict[str, tuple[Spoil, str]] = {
    "nan": (_params(lambda own, start: own * torch.nan), "its params are not finite"),
    "infinite": (_params(lambda own, start: torch.tensor([0.0, torch.inf, 0.0])), "its params are not finite"),
    "short": (_params(lambda own, start: own[:2]), "its params are torch.float32 (2,)"),
    "one number": (_params(lambda own, start: own[:1]), "its params are torch.float32 (1,)"),  # would be broadcast
    "double": (_params(lambda own, start: own.double()), "its params are torch.float64 (3,)"),
    "zero": (_params(lambda own, start: start.clone()), "its update is zero"),
    "signed zero": (_params(lambda own, start: -start), "its update is zero"),
    "payload": (
        lambda reply, start, round_: replace(reply, payload={"extra": torch.tensor([torch.nan])}),
        "its payload is not finite",
    ),
    "loss": (_metrics(loss=1e300), "its loss is not finite, or huge"),
    "round": (_metrics(round=7.0), "it calls a term of its loss what none is called"),
    "knn": (_metrics(knn=100.0), "it calls a term of its loss what none is called"),
    "silent": (lambda reply, start, round_: replace(reply, metrics={}), "it does not tell its loss"),
    "images": (lambda reply, start, round_: replace(reply, examples=1 << 62), "the number of its images cannot be"),
}


@pytest.mark.parametrize("kind", BAD)
def test_what_cannot_be_an_update_is_refused(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    spoil, reason = BAD[kind]
    state, (record,) = _play({1: spoil})
    assert record["left_out"] == {"1": reason}
    assert record["clients"] == [0, 2, 3, 4]
    assert record["round"] == 1
    assert f"client 1 is left out of round 1: {reason}" in caplog.text
    without, _ = _play({1: BAD["nan"][0]})
    assert torch.equal(state.server.model.params, without.server.model.params)
    assert summarise([{**record, "seconds": 1, "samples_per_second": 1}])["left_out"] == {"1": {reason: 1}}


def test_among_our_own_clients_a_model_that_is_not_finite_stops_the_run() -> None:
    with pytest.raises(TrainingError, match="the model of client 1 is not finite after round 1"):
        _play({1: BAD["nan"][0]}, trusted=True)


def test_a_copy_of_another_clients_model_is_refused() -> None:
    sent = {}

    def take(reply: Reply, start: ModelState, round_: int) -> Reply:
        sent[round_] = reply.model
        return reply

    _, (record,) = _play({1: take, 3: lambda reply, start, round_: replace(reply, model=sent[round_])})
    assert record["left_out"] == {"3": "its model is that of client 1"}


def test_a_replay_is_refused_of_whomever_it_is() -> None:
    kept: list[ModelState] = []

    def replay(reply: Reply, start: ModelState, round_: int) -> Reply:
        kept.append(ModelState(reply.model.params.clone(), reply.model.buffers.clone()))
        return replace(reply, model=kept[0])

    _, records = _play({1: replay, 2: lambda r, s, n: r if n == 1 else replace(r, model=kept[0])}, rounds=3)
    before = "its model is one that client 1 has sent before"
    assert "left_out" not in records[0]
    assert [record["left_out"] for record in records[1:]] == [{"1": before, "2": before}] * 2
    timed = [{**record, "seconds": 1, "samples_per_second": 1} for record in records]
    assert summarise(timed)["left_out"] == {"1": {before: 2}, "2": {before: 2}}


def test_a_resumed_server_knows_replays(tmp_path: Path) -> None:
    state, _ = _play({}, rounds=2)
    method = _method()
    assert all(len(models) == 2 for models in state.seen.values())
    checkpoints = Checkpoints(tmp_path / "checkpoint", *method.layouts)
    checkpoints.save(state, {})
    loaded, _, _ = checkpoints.latest("cpu") or pytest.fail("nothing was written")
    assert loaded.seen == state.seen


def test_fingerprints_are_remembered_for_a_while_only() -> None:
    seen: dict[int, tuple[str, ...]] = {}
    for round_ in range(REMEMBERED + 3):
        _, refused, seen = inspected(_arrivals([[1.0, 2.0, 3.0 + round_]]), START, Layout(()), seen)
        assert not refused
    assert len(seen[0]) == REMEMBERED
    assert fingerprints(torch.tensor([[1.0, 2.0, 3.0]]))[0] not in seen[0]


def test_fingerprints_tell_bits_and_places() -> None:
    rows = torch.tensor([[1.0, 2.0, 3.0], [2.0, 1.0, 3.0], [1.0, 2.0, 3.0], [1.0, 2.0, 3.0000002], [-0.0, 0, 0]])
    first, swapped, same, next_, _ = fingerprints(rows)
    assert first == same
    assert len({first, swapped, next_}) == 3
    bits = [int.from_bytes(torch.tensor(x).numpy().tobytes(), "little", signed=True) for x in (1.0, 2.0, 3.0)]
    assert first == f"{sum(bits):016x}{bits[1] + 2 * bits[2]:016x}"


def test_negative_variances_are_refused() -> None:
    arrivals = _arrivals([[1.0, 0, 0], [0, 1.0, 0]], [[-1.0, 0.5], [0.0, -0.5]])
    kept, refused, _ = inspected(arrivals, START, VARIANCES, {})
    assert refused == {1: "its variances are negative"}
    assert [reply.client for reply in kept.replies] == [0]


def test_the_payload_of_orchestra_is_what_it_must_be(micro: Experiment) -> None:
    method = methods["orchestra"].build(micro.with_(method="orchestra", objective="orchestra", aggregator="fedavg"))
    rows = torch.nn.functional.normalize(torch.randn(16, method._projections), dim=1)
    assert method.doubts({"centroids": rows}) is None
    assert method.doubts({}) == "its payload is not centroids"
    assert "its centroids are (16, 3)" in str(method.doubts({"centroids": rows[:, :3]}))
    assert "longer" in str(method.doubts({"centroids": 1e20 * rows}))


# What is bounded


def test_a_long_update_is_shortened_and_told(caplog: pytest.LogCaptureFixture) -> None:
    _, (honest,) = _play({})
    assert "bounded" not in honest
    state, (record,) = _play({2: _params(lambda own, start: start + 90 * (own - start))})
    reason = "its update is more than 20 times as long as the median"
    assert record["bounded"] == {"2": [reason]}
    assert f"client 2 is bounded in round 1: {reason}" in caplog.text
    # All updates have the length ½‖(±2, ±2, ±2)‖ · ½ = √3/2: the long one counts twentyfold.
    ends = torch.tensor([[0.5 if c else -0.5 for c in rgb] for _, rgb in COLOURS])
    ends[2] *= 20
    assert torch.allclose(state.server.model.params, ends.mean(0), atol=1e-5)
    assert summarise([{**record, "seconds": 1, "samples_per_second": 1}])["bounded"] == {"2": {reason: 1}}


@pytest.mark.parametrize("factor", [1000.0, 3e38])
def test_an_outsized_update_is_refused(factor: float) -> None:
    state, (record,) = _play({2: _params(lambda own, start: torch.full_like(own, factor))})
    assert record["left_out"] == {"2": "its update is more than 100 times as long as the median"}
    assert record["clients"] == [0, 1, 3, 4]
    assert float(state.server.model.params.norm()) < 1


def test_the_largest_numbers_do_not_overflow() -> None:
    huge = {2: _params(lambda own, start: torch.full_like(own, 3e38))}
    state, (record,) = _play(huge, trusted=True, **{"defence.clip": 20})
    assert "2" in record["bounded"]
    assert float(state.server.model.params.norm()) < 6


def test_buffers_are_shortened_by_their_own_lengths() -> None:
    arrivals = _arrivals([[1.0, 0, 0]] * 5, [[2.0, 1.0]] * 4 + [[1.0, 41.0]])
    kept, told = bounded(arrivals, START, DefenceOptions(clip=2), trusted=True)
    assert told == {4: ["the update of its buffers is more than 2 times as long as the median"]}
    assert kept.buffers.tolist() == [[2.0, 1.0]] * 4 + [[1.0, 3.0]]
    assert kept.params.tolist() == [[1.0, 0.0, 0.0]] * 5


def test_only_long_rows_are_touched() -> None:
    rows = torch.tensor([[1.1, 0.3], [0.7, -0.9], [30.0, 40.0]])
    before = rows.clone()
    assert shortened(rows, torch.zeros(2), 2.0) == [2]
    assert torch.equal(rows[:2], before[:2])
    median = float(before.norm(dim=1).median())
    assert torch.allclose(rows[2], torch.tensor([0.6, 0.8]) * 2 * median)
    assert shortened(torch.ones(3, 0), torch.ones(0), 2.0) == []


def test_clipped_variances_stay_positive() -> None:
    rows = torch.tensor([[1.2], [0.9], [1.1], [0.0], [1e6]])
    shortened(rows, torch.ones(1), 1.0)
    assert bool((rows > 0).all())


def test_claims_are_bounded_by_the_median() -> None:
    assert claims([10, 20, 30, 200, 201], 10) == {}
    assert claims([10, 20, 30, 1 << 39], 10) == {3: 200}
    _, (record,) = _play({0: lambda reply, start, round_: replace(reply, examples=10**9)})
    assert record["fedavg.weights"] == pytest.approx([12 / 28, *([4 / 28] * 4)])
    assert record["bounded"] == {"0": ["it claims more than 3 times as many images as the median"]}


def test_our_own_clients_are_bounded_only_where_asked() -> None:
    huge = {2: _params(lambda own, start: start + 1000 * (own - start))}
    _, (free,) = _play(huge, trusted=True)
    assert "bounded" not in free
    _, (asked,) = _play(huge, trusted=True, **{"defence.clip": 2})
    assert "2" in asked["bounded"]


def test_honest_clients_keep_their_bits(micro: Experiment, tmp_path: Path) -> None:
    """Three uneven clients and batch norm: nothing is refused or bounded, and the model is that of trusted clients."""
    plain = fedu2.train(micro.with_(method="fedbyol"), tmp_path / "plain")
    guarded = fedu2.train(
        micro.with_(method="fedbyol"),
        tmp_path / "guarded",
        backend=lambda *parts: Hostile(LocalBackend(*parts), [], None),
    )
    ours, theirs = plain.learner().state_dict(), guarded.learner().state_dict()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert not any({"left_out", "bounded"} & record.keys() for record in guarded.history)


# What is outvoted


def test_krum_scores_by_hand() -> None:
    # On a line at 0, 1, 2, 3 and 10, with f = 1: each counts its 2 nearest.
    places = torch.tensor([0.0, 1.0, 2.0, 3.0, 10.0], dtype=torch.float64)
    scores = krum_scores((places[:, None] - places).square(), 1)
    assert scores.tolist() == [1 + 4, 1 + 1, 1 + 1, 1 + 4, 49 + 64]


def _crowd(*hostile: Sequence[float]) -> Arrivals:
    honest = [[1.0, 0.1, 0.0], [1.0, -0.1, 0.1], [0.9, 0.0, -0.1], [1.1, 0.1, 0.1], [1.0, 0.0, 0.0], [1.0, 0.2, 0.0],
              [0.8, 0.0, 0.1]]  # fmt: skip
    return _arrivals([*honest, *hostile])


@pytest.mark.parametrize("one", [[-1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [-1e-3, 0.0, 0.0]])
def test_multi_krum_leaves_out_who_is_far(one: list[float]) -> None:
    three = [one, [1.1 * one[0], 1.1 * one[1], 0.01 * one[0]], [0.9 * one[0], 0.9 * one[1], 0.0]]
    kept, why = selected(_crowd(*three), START, DefenceOptions(rule="multi_krum", hostile=0.3))
    assert [reply.client for reply in kept.replies] == [0, 1, 2, 3, 4, 5, 6]
    assert why == dict.fromkeys((7, 8, 9), "it is far from the others (multi_krum)")
    assert len(kept.params) == 7


def test_multi_krum_does_not_mind_an_honest_client_with_a_long_update() -> None:
    crowd = _crowd([8.0, 0.5, 0.2], [-1.0, 0.0, 0.0], [-1.1, 0.1, 0.0])
    assert multi_krum(crowd, START, 2) == [0, 1, 2, 3, 4, 5, 6, 7]


def test_multi_krum_leaves_out_nobody_who_does_not_stand_out() -> None:
    random = torch.Generator().manual_seed(0)
    honest = torch.randn(10, 20_000, generator=random) + 0.4 * torch.randn(20_000, generator=random)
    arrivals = Arrivals([_reply(client) for client in range(10)], honest, torch.full((10, 2), 2.0))
    assert multi_krum(arrivals, ModelState(torch.zeros(20_000), torch.ones(2)), 3) == list(range(10))


def test_multi_krum_is_not_fooled_by_accomplices() -> None:
    """Honest updates that have little in common, and three attackers that agree: reversed mean, or any direction."""
    random = torch.Generator().manual_seed(0)
    honest = torch.randn(7, 20_000, generator=random) + 0.4 * torch.randn(20_000, generator=random)
    start = ModelState(torch.zeros(20_000), torch.ones(2))
    for direction in (-honest.mean(0), torch.randn(20_000, generator=random)):
        alike = torch.stack([direction * (1 + 1e-4 * copy) for copy in range(3)])
        arrivals = Arrivals(
            [_reply(client) for client in range(10)], torch.cat([honest, alike]), torch.full((10, 2), 2.0)
        )
        assert multi_krum(arrivals, start, 3) == [0, 1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(("rule", "too_few"), [("multi_krum", 4), ("trimmed", 3)])
def test_a_rule_needs_company_and_says_so(rule: str, too_few: int, caplog: pytest.LogCaptureFixture) -> None:
    far = [[1.0, 0, 0], [-9.0, 0, 0], [1.1, 0, 0], [0.9, 0, 0], [1.0, 0.1, 0]]
    options = DefenceOptions(rule=rule, hostile=0.3)
    few = _arrivals(far[:too_few])
    assert selected(few, START, options) == (few, {})
    assert f"defence.rule={rule} does nothing: {too_few} clients are too few for it" in caplog.text
    caplog.clear()
    enough = _arrivals(far[: too_few + 1])
    kept, _ = selected(enough, START, options)
    assert float(kept.params.min()) > -9
    assert selected(_arrivals(far), START, DefenceOptions())[1] == {}
    assert not caplog.text


def test_poisoned_buffers_alone_are_found() -> None:
    crowd = _crowd([1.0, 0.05, 0.0], [0.95, 0.0, 0.0], [1.05, 0.0, 0.0])
    crowd.buffers.copy_(1 + 0.1 * torch.rand(10, 2, generator=torch.Generator().manual_seed(0)))
    crowd.buffers[7:, 1] = 100.0
    assert multi_krum(crowd, START, 3) == [0, 1, 2, 3, 4, 5, 6]
    trimmed(crowd, START, 3)
    assert float(crowd.buffers.max()) < 1.2
    crowd.buffers[7:, 1] = 100.0
    assert shortened(crowd.buffers, START.buffers, 10.0) == [7, 8, 9]
    assert float(crowd.buffers.max()) < 3


def test_trimmed_by_hand() -> None:
    arrivals = _arrivals([[1.0, 9.0, 0], [2.0, -9.0, 0], [3.0, 1.0, 0], [4.0, 2.0, 0], [100.0, 3.0, 0]])
    assert trimmed(arrivals, START, 1) == [0, 1, 2, 3, 4]
    assert arrivals.params[:, 0].tolist() == [2.0, 2.0, 3.0, 4.0, 4.0]
    assert arrivals.params[:, 1].tolist() == [3.0, 1.0, 1.0, 2.0, 3.0]


def test_a_round_with_a_rule_logs_whom_it_left_out(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "fedu2")
    _, (record,) = _play({}, **{"defence.rule": "multi_krum", "defence.hostile": 0.2})
    (client,) = record["left_out"]
    assert int(client) not in record["clients"]
    assert f"client {client} is left out of round 1: it is far from the others" in caplog.text
    assert len(record["fedavg.weights"]) == 4
    assert record["bytes_up"] == record["bytes_down"] > 0
    _, (all_in,) = _play({})
    assert record["bytes_up"] == all_in["bytes_up"]  # it travelled all the same


# EUA


def _tiny_against(hostile: int, clients: int = 10) -> tuple[Tensor, Tensor]:
    """Honest updates (K − h, P) and, below them, tiny ones against their mean."""
    random = torch.Generator().manual_seed(3)
    common = torch.randn(50, generator=random, dtype=torch.float64)
    honest = common + torch.randn(clients - hostile, 50, generator=random, dtype=torch.float64)
    tiny = -torch.linspace(1e-3, 2e-3, hostile, dtype=torch.float64)[:, None] * honest.mean(0)
    return honest, torch.cat([honest, tiny])


@pytest.mark.parametrize("hostile", [1, 3])
@pytest.mark.parametrize("step", ["convex", "fedavg_norm"])
def test_tiny_updates_have_no_more_than_their_shares(hostile: int, step: str) -> None:
    honest, deltas = _tiny_against(hostile)
    shares = torch.full((10,), 0.1, dtype=torch.float64)

    def progress(guard: float | None) -> tuple[float, float]:
        """How far the step goes along the honest mean, in units of it; and the attackers' weight."""
        updates = Updates(torch.zeros(50, dtype=torch.float64), deltas.clone(), shares)
        result = eua(EUAOptions(guard=guard, step=step))(updates)
        mean = honest.mean(0)
        return float(result.params @ mean / (mean @ mean)), sum(result.metrics["weights"][-hostile:])

    assert progress(None)[1] > 0.99  # as published: a veto
    along, weight = progress(3.0)  # a cap of guard · share alone would leave them 0.3 each
    assert weight == pytest.approx(0.1 * hostile)
    assert along > 0.95 * (1 - 0.1 * hostile)  # FedAvg's step is (1 − h) of the honest mean


@pytest.mark.parametrize("attack", ATTACKS)
def test_attacks_play_on_a_real_encoder(micro: Experiment, tmp_path: Path, attack: str) -> None:
    experiment = micro.with_(clients=5, rounds=1, split__min_size=20, defence__rule="multi_krum", defence__hostile=0.2)
    run = fedu2.train(
        experiment,
        tmp_path / "run",
        backend=lambda *parts: Hostile(LocalBackend(*parts), [1], ATTACKS[attack]),
    )
    assert list(run.history[-1]["left_out"]) == ["1"]
    assert json.loads((run.path / "summary.json").read_text())["left_out"]["1"]


def test_the_table_in_the_document_is_that_of_the_record() -> None:
    record, text = json.loads(robustness.RECORD.read_text()), robustness.PAGE.read_text()
    assert robustness.table(record) in text
    assert {run["attack"] for run in record["runs"]} <= {"none", *ATTACKS}


@pytest.mark.parametrize("share", robustness.SHARES)
@pytest.mark.parametrize("attack", ATTACKS)
def test_with_bounds_and_multi_krum_no_attack_cost_two_points(attack: str, share: float) -> None:
    """As docs/robustness.md promises: in the mean over at least three seeds, beside the same seeds without attack."""
    runs = json.loads(robustness.RECORD.read_text())["runs"]
    free = {run["seed"]: run["knn"] for run in runs if (run["attack"], run["defence"]) == ("none", "none")}
    asked = (attack, share, "bounds, multi-Krum")
    found = {run["seed"]: run["knn"] for run in runs if (run["attack"], run["share"], run["defence"]) == asked}
    assert len(found) >= 3
    assert sum(knn - free[seed] for seed, knn in found.items()) / len(found) > -2


# What stands between a reply and its round, line by line


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("which", ["params", "buffers"])
def test_neither_parameters_nor_buffers_may_be_anything_but_finite(which: str, value: float) -> None:
    arrivals = _arrivals([[1.0, 0, 0], [0, 1.0, 0]])
    getattr(arrivals, which)[1, 0] = value
    kept, refused, _ = inspected(arrivals, START, VARIANCES, {})
    assert refused == {1: f"its {which} are not finite"}
    assert [reply.client for reply in kept.replies] == [0]


def _terms(names: Sequence[str]) -> Mapping[str, float]:
    return {"loss": 1.0, **dict.fromkeys(names, 1.0)}


@pytest.mark.parametrize(
    ("sound", "beyond", "reason"),
    [
        ({"samples": 0}, {"samples": -1}, "the number of its images cannot be"),
        ({"samples": (1 << 40) - 1}, {"samples": 1 << 40}, "the number of its images cannot be"),
        ({"examples": (1 << 40) - 1}, {"examples": 1 << 40}, "the number of its images cannot be"),
        ({"examples": 1}, {"examples": 0}, "the number of its images cannot be"),
        ({"metrics": _terms([f"term{n}" for n in range(63)])}, {"metrics": _terms([f"term{n}" for n in range(64)])},
         "it does not tell its loss"),
        ({"metrics": _terms(["fur.mass"])}, {"metrics": _terms(["fur mass"])}, "it calls a term of its loss"),
        ({"metrics": _terms(["a" * 64])}, {"metrics": _terms(["a" * 65])}, "it calls a term of its loss"),
        ({"payload": {}}, {"payload": {"junk": torch.zeros(3)}}, "it sends a payload, and the method has none"),
    ],
)  # fmt: skip
def test_a_reply_keeps_within_every_limit(sound: dict, beyond: dict, reason: str) -> None:
    assert misfit(replace(_reply(0), **sound), START, _method()) is None
    assert str(misfit(replace(_reply(0), **beyond), START, _method())).startswith(reason)
