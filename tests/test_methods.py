"""What holds for every method with every objective it goes with."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest
import torch

import fedu2
from fedu2.aggregators import aggregators
from fedu2.data import load_dataset
from fedu2.engine import Engine
from fedu2.errors import UsageError
from fedu2.experiment import Experiment
from fedu2.federation.callbacks import Callback
from fedu2.federation.local import LocalBackend
from fedu2.federation.rounds import initial_state, play_round
from fedu2.methods import Method, Task, build, methods, plain_fedavg, resolve, title_of
from fedu2.models.flat import FlatModel
from fedu2.paper import plan
from fedu2.paper.records import check_cell

ROOT = Path(__file__).parents[1]
BUILT_IN = sorted(methods._sealed)
PAIRS = [(name, objective) for name in BUILT_IN for objective in methods[name].objectives]
IDS = ["-".join(pair) for pair in PAIRS]
SMALL = [
    "orchestra.global_clusters=8",
    "orchestra.local_clusters=4",
    "orchestra.memory=40",
    "orchestra.server_steps=20",
]


def _setting(micro: Experiment, name: str, objective: str, *settings: str) -> Experiment:
    return resolve(Experiment.parse(micro.flat(), [f"method={name}", f"objective={objective}", *SMALL, *settings]))


def _state(path: Path) -> bytes:
    newest = max((path / "checkpoint").glob("round-*"))
    return b"".join(file.name.encode() + file.read_bytes() for file in sorted(newest.glob("*.safetensors")))


def test_the_tables_methods_are_there() -> None:
    tables = {
        "fedsimsiam",
        "fedsimclr",
        "fedbyol",
        "fedu",
        "fedema",
        "fedx",
        "orchestra",
        "ldawa",
        "feddecorr",
        "fedu2",
    }
    assert tables | {"fedalignuniform", "ssd"} <= set(BUILT_IN)
    assert {("fedx", "byol"), ("fedx", "simclr"), ("ldawa", "byol"), ("feddecorr", "simsiam")} <= set(PAIRS)


@pytest.mark.parametrize(("name", "objective"), PAIRS, ids=IDS)
def test_trains_and_resumes_bit_identically(micro: Experiment, tmp_path: Path, name: str, objective: str) -> None:
    experiment = _setting(micro, name, objective, "evaluation.every=1")
    whole = fedu2.train(experiment, tmp_path / "whole")
    assert [record["round"] for record in whole.history] == [0, 1, 2]

    class Stop(Callback):
        def on_epoch(self, report) -> None:
            if report.task.round == 2:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fedu2.train(experiment, tmp_path / "cut", callbacks=[Stop()])
    resumed = fedu2.train(experiment, tmp_path / "cut", resume=True)
    assert _state(resumed.path) == _state(whole.path)
    clocks = {"seconds", "samples_per_second", "evaluation_seconds"}
    for a, b in zip(resumed.history, whole.history, strict=True):
        assert {k: v for k, v in a.items() if k not in clocks} == {k: v for k, v in b.items() if k not in clocks}


@pytest.mark.parametrize(("name", "objective"), PAIRS, ids=IDS)
def test_partial_participation_and_small_clients(micro: Experiment, tmp_path: Path, name: str, objective: str) -> None:
    partition = tmp_path / "partition.json"
    shares = [[0, 1], list(range(2, 10)), list(range(10, 80)), list(range(80, 110)), list(range(110, 200))]
    partition.write_text(json.dumps(shares))
    settings = ["partition=file", f"split.file={partition}", "participation=0.4", "rounds=4", "local_steps=2"]
    run = fedu2.train(_setting(micro, name, objective, *settings), tmp_path / "run")
    assert all(len(record["clients"]) == 2 for record in run.history[1:])
    seen = {client for record in run.history[1:] for client in record["clients"]}
    assert len(seen) > 2  # clients join late, others are absent for a while
    assert all(torch.tensor(record["client_loss"]).isfinite().all() for record in run.history[1:])


@pytest.mark.parametrize(("name", "objective"), PAIRS, ids=IDS)
def test_lanes_and_stacked_views_change_nothing(micro: Experiment, name: str, objective: str) -> None:
    """What a GPU does, in float32 on a CPU: several clients at once, both views in one pass."""
    experiment = _setting(micro, name, objective, "local_steps=2")
    data = load_dataset("sample", experiment.data)
    shares = [torch.arange(64), torch.arange(64, 104), torch.arange(104, 200)]
    losses, models = [], []
    for engine in (Engine(torch.device("cpu")), Engine(torch.device("cpu"), fused=True, lanes=3)):
        method = build(experiment)
        backend = LocalBackend(method, data.train, shares, engine)
        state = initial_state(method, "cpu")
        for _ in range(2):
            state, record = play_round(state, method, backend, [len(share) for share in shares], Callback())
        assert all(lane.step.learner.paired == engine.fused for lane in backend.lanes)
        losses.append(record["client_loss"])
        models.append(state.server.model.params)
    assert losses[1] == pytest.approx(losses[0], rel=2e-3, abs=2e-4)  # sums are rounded in another order
    assert (models[1] - models[0]).norm() <= 1e-2 * models[0].norm()


@pytest.mark.parametrize(("name", "objective"), PAIRS, ids=IDS)
def test_a_round_leaves_no_trace_in_the_next_client(micro: Experiment, name: str, objective: str) -> None:
    """One model object serves all clients: the second of them gets what it would get alone."""
    experiment = _setting(micro, name, objective)
    data = load_dataset("sample", experiment.data)
    shares = [torch.arange(64), torch.arange(64, 104)]
    method = build(experiment)
    backend = LocalBackend(method, data.train, shares)
    state = initial_state(method, "cpu")
    state, _ = play_round(state, method, backend, [64, 40], Callback())
    tasks = [Task(2, client, 2, 0.05, 0.5) for client in (0, 1)]
    both = {reply.client: reply for reply in backend.run(tasks, state.server, state.memories, Callback())}
    fresh = LocalBackend(method, data.train, shares)
    (alone,) = fresh.run(tasks[1:], state.server, state.memories, Callback())
    assert torch.equal(both[1].model.params, alone.model.params)
    assert torch.equal(both[1].model.buffers, alone.model.buffers)
    for mine, its in ((both[1].memory, alone.memory), (both[1].payload, alone.payload)):
        assert mine.keys() == its.keys()
        assert all(torch.equal(mine[name], its[name]) for name in mine)


@pytest.mark.parametrize(("name", "objective"), PAIRS, ids=IDS)
def test_every_method_can_have_rotation_and_equal_steps(
    micro: Experiment, tmp_path: Path, name: str, objective: str
) -> None:
    steps = ["local_steps=equal", "local_epochs=1", "max_local_epochs=2", "data.validation=0.75", "rounds=1"]
    run = fedu2.train(_setting(micro, name, objective, "rotation.weight=0.5", *steps), tmp_path / "run")
    assert 0.5 < run.history[-1]["rotation"] < 3  # log 4 = 1.39 at the start


@pytest.mark.parametrize("name", BUILT_IN)
def test_what_stays_does_not_travel(micro: Experiment, name: str) -> None:
    method = build(_setting(micro, name, methods[name].objectives[0]))
    travels = {entry.section for layout in method.layouts for entry in layout.entries}
    model = FlatModel(method.learner())
    everything = {entry.section for layout in (model.layout, model.buffer_layout) for entry in layout.entries}
    assert everything - travels == set(method.stays) | set(method.scratch)
    assert "encoder" in travels


@pytest.mark.parametrize("name", [name for name in BUILT_IN if {"byol", "orchestra"} & set(methods[name].objectives)])
def test_a_fresh_target_neither_travels_nor_is_remembered(micro: Experiment, name: str) -> None:
    """What a client did in a former round does not reach its target: it is that of a client that was never seen."""
    objective = "byol" if "byol" in methods[name].objectives else "orchestra"
    method = build(_setting(micro, name, objective, "byol.target=fresh"))
    assert "target" not in {entry.section for layout in method.layouts for entry in layout.entries}
    data = load_dataset("sample", method.experiment.data)
    backend = LocalBackend(method, data.train, [torch.arange(64)])
    state = initial_state(method, "cpu")
    for _ in range(2):
        state, record = play_round(state, method, backend, [64], Callback())
        assert math.isfinite(record["loss"])
    assert not any(key.startswith("target") for memory in state.memories.values() for key in memory)
    seen, unseen = FlatModel(method.learner()), FlatModel(method.learner())
    task = Task(3, 0, 2, 0.05, 0.5)
    method.receive(seen, state.server, state.memories.get(0), task)
    method.receive(unseen, state.server, None, task)
    assert torch.equal(seen.section("target").params, unseen.section("target").params)
    assert torch.equal(seen.section("target").buffers, unseen.section("target").buffers)
    encoder = seen.layout.span("encoder")  # with which a target begins
    assert torch.equal(unseen.section("target").params[: encoder.stop], state.server.model.params[encoder])


@pytest.mark.parametrize("name", BUILT_IN)
def test_every_method_has_a_card_and_a_page(name: str) -> None:
    card = methods[name]
    assert card.summary.endswith(".")
    assert re.search(r"\d{4}", card.reference)
    page = (ROOT / "docs" / "methods" / f"{name}.md").read_text(encoding="utf-8")
    assert page.startswith(f"# {card.title}\n")
    index = (ROOT / "docs" / "methods" / "README.md").read_text(encoding="utf-8")
    assert f"[{card.title}]({name}.md)" in index


def test_the_bytes_in_the_documents_are_those_of_the_models() -> None:
    """docs/methods/ tells what travels with ResNet-18."""
    index = (ROOT / "docs" / "methods" / "README.md").read_text(encoding="utf-8")
    for name, objective in PAIRS:
        method = build(resolve(Experiment.parse({"dataset": "cifar10", "method": name, "objective": objective})))
        sent = 4 * sum(method.travelling)
        row = next(line for line in index.splitlines() if line.startswith(f"| [{methods[name].title}]"))
        assert f"{objective} {sent / 1e6:.1f}" in row, (name, objective, sent / 1e6)
        page = (ROOT / "docs" / "methods" / f"{name}.md").read_text(encoding="utf-8")
        assert f"{sent / 1e6:.1f} MB ({objective})" in page, (name, objective, sent / 1e6)


def test_methods_are_compared_with_their_baselines(micro: Experiment) -> None:
    plain = {name: plain_fedavg(_setting(micro, name, methods[name].objectives[0])) for name in BUILT_IN}
    assert {name for name, experiment in plain.items() if experiment is None} == {
        "fedsimclr", "fedsimsiam", "fedbyol", "fedalignuniform", "orchestra",
    }  # fmt: skip
    assert plain["fedema"].method == plain["fedu"].method == "fedbyol"
    assert plain["ldawa"].method == plain["fedx"].method == "fedsimclr"
    assert plain["ssd"].method == "fedalignuniform"
    assert (plain["fedu2"].method, plain["fedu2"].fur.weight, plain["fedu2"].aggregator) == ("fedu2", 0, "fedavg")
    assert all(experiment.aggregator == "fedavg" for experiment in plain.values() if experiment)


def test_runs_of_before_may_hold_a_target_that_means_nothing() -> None:
    """FedU²'s target was shared, also with objectives that have none: such a run is still told for what it is."""
    cell = plan.cell(plan.HOME, "fedu2-simsiam")
    before = cell.experiment(0).with_(byol__target="shared")
    check_cell(cell, before)
    compared = plain_fedavg(before)
    assert compared is not None
    assert title_of(before) == "FedU²-SimSiam"
    assert title_of(compared.with_(byol__target="shared")) == "FedAvg-SimSiam"


@pytest.mark.parametrize("name", ["fedema", "feddecorr", "fedu2"])
def test_a_comparison_changes_the_method_alone(micro: Experiment, name: str) -> None:
    experiment = _setting(micro, name, "byol", "byol.target=shared", "rotation.weight=0.5")
    plain = plain_fedavg(experiment)
    assert plain is not None
    changed = {key for key, value in plain.flat().items() if value != experiment.flat()[key]}
    assert changed <= {"method", "aggregator", "fur.weight"}
    assert plain_fedavg(plain) is None


def test_sections_that_stay_begin_afresh_at_every_client(micro: Experiment) -> None:
    """A predictor that never travels: what one client leaves in the model is not where the next one begins."""
    experiment = _setting(micro, "fedsimsiam", "simsiam")
    method = Method(experiment, aggregators["fedavg"](experiment), stays=("predictor",))
    data = load_dataset("sample", experiment.data)
    shares = [torch.arange(64), torch.arange(64, 104)]
    tasks = [Task(1, client, 2, 0.05, 0.0) for client in (0, 1)]
    server = initial_state(method, "cpu").server
    both = {r.client: r for r in LocalBackend(method, data.train, shares).run(tasks, server, {}, Callback())}
    (alone,) = LocalBackend(method, data.train, shares).run(tasks[1:], server, {}, Callback())
    assert torch.equal(both[1].model.params, alone.model.params)
    assert torch.equal(both[1].memory["predictor.params"], alone.memory["predictor.params"])
    fresh = FlatModel(method.learner())
    method.receive(fresh, server, None, tasks[0])
    assert torch.equal(fresh.section("predictor").params, FlatModel(method.learner()).section("predictor").params)


def test_a_prelude_counts_as_part_of_round_one(micro: Experiment, tmp_path: Path) -> None:
    run = fedu2.train(_setting(micro, "orchestra", "orchestra", "rounds=2"), tmp_path / "run")
    one, two = run.history[1], run.history[2]
    method = build(run.experiment)
    model, centroids = 4 * sum(method.travelling), 4 * 4 * 16  # four local clusters of 16 dimensions
    assert two["bytes_up"] == 3 * (model + centroids)
    assert one["bytes_up"] == two["bytes_up"] + 3 * centroids
    assert one["bytes_down"] == 3 * (model + 4 * 8 * 16) + 3 * model
    assert "orchestra.clustering" in one


def test_objectives_that_do_not_go_with_a_method_are_refused(micro: Experiment) -> None:
    with pytest.raises(UsageError, match="'fedema' does not go with objective=simclr: choose from byol"):
        _setting(micro, "fedema", "simclr")


def test_no_code_asks_for_a_methods_name() -> None:
    """Names belong to the registry; nothing else may branch on them."""
    names = "|".join(BUILT_IN)
    for path in (ROOT / "src" / "fedu2").rglob("*.py"):
        found = re.search(rf"(method\w*|card)\s*(==|!=|in)\s*[\[\(\{{]?\s*[\"']({names})[\"']", path.read_text())
        assert found is None, f"{path.name}: {found and found.group()}"
