"""What a run uses of a machine: decisions, fallbacks, and lanes that change nothing. Runs without a GPU."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

import fedu2
from fedu2 import engine as engines
from fedu2.data import load_dataset
from fedu2.doctor import findings, try_out, versions
from fedu2.engine import Engine, choose, choose_threads
from fedu2.errors import TrainingError, UsageError
from fedu2.experiment import Experiment
from fedu2.federation import capture
from fedu2.federation.callbacks import Callback
from fedu2.federation.capture import WORTH_CAPTURING, CapturedSteps, Verdict
from fedu2.federation.lane import Lane
from fedu2.federation.local import LocalBackend
from fedu2.federation.rounds import initial_state
from fedu2.methods import Reply, Task, build, resolve

CPU = torch.device("cpu")


def _with(experiment: Experiment, *settings: str) -> Experiment:
    return resolve(Experiment.parse(experiment.flat(), settings))


def _run(experiment: Experiment, path: Path) -> tuple[dict[str, object], dict[str, Tensor]]:
    run = fedu2.train(experiment, path)
    record = {key: value for key, value in run.history[-1].items() if "second" not in key}
    return record, dict(run.learner().state_dict())


def test_a_cpu_uses_none_of_the_gpu_paths_and_says_why() -> None:
    chosen = choose(Experiment(), CPU)
    assert (chosen.fused, chosen.graph, chosen.compile, chosen.lanes) == (False, False, False, 1)
    assert chosen.precision == torch.float32
    assert chosen.reasons["graph"] == chosen.reasons["fused"] == "no CUDA device"
    assert chosen.summary() == "the CPU, float32"


def test_keys_decide_where_they_are_set() -> None:
    asked = Experiment.parse(
        {"precision": "bfloat16", "engine": {"lanes": 3, "graph": False, "fused": False}, "device": "cpu"}
    )
    chosen = choose(asked, CPU)
    assert chosen.precision == torch.bfloat16
    assert chosen.lanes == 3
    assert chosen.reasons["lanes"] == "asked for by engine.lanes=3"
    assert chosen.reasons["graph"] == chosen.reasons["fused"] == "switched off by its key"
    with pytest.raises(UsageError, match=r"engine\.lanes"):
        Experiment.parse({"engine": {"lanes": 0}})


def test_threads_leave_busy_cores_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(engines, "usable_cores", lambda: 8.0)
    counts = {}
    for load in (0.0, 0.4, 3.0, 7.6, 30.0):
        monkeypatch.setattr(engines.os, "getloadavg", lambda load=load: (load, 0.0, 0.0))
        counts[load] = choose_threads("auto")[0]
    assert counts == {0.0: 8, 0.4: 8, 3.0: 5, 7.6: 1, 30.0: 1}
    assert choose_threads(3) == (3, "asked for by engine.threads=3")
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert choose_threads("auto") == (2, "asked for by OMP_NUM_THREADS=2")


def test_a_run_keeps_its_number_of_threads(micro: Experiment, tmp_path: Path) -> None:
    run = fedu2.train(_with(micro, "engine.threads=2", "rounds=1"), tmp_path / "run")
    assert run.experiment.engine.threads == 2
    torch.set_num_threads(1)
    longer = fedu2.train(_with(micro, "engine.threads=auto", "rounds=2"), run.path, resume=True)
    assert longer.experiment.engine.threads == 2
    assert torch.get_num_threads() == 2
    torch.set_num_threads(1)


@pytest.mark.parametrize("lanes", [2, 3])
@pytest.mark.parametrize("method", ["fedu2", "fedbyol"])
def test_lanes_change_nothing(micro: Experiment, tmp_path: Path, method: str, lanes: int) -> None:
    experiment = _with(micro, f"method={method}", "local_steps=epochs", "local_epochs=2", "clients=4")
    one, several = (
        _run(_with(experiment, f"engine.lanes={n}"), tmp_path / f"{n}") for n in (1, lanes)
    )  # with uneven clients, so that replies arrive out of order
    assert one[0] == several[0]
    assert all(torch.equal(tensor, several[1][name]) for name, tensor in one[1].items())


def test_several_lanes_begin_with_the_longest_client(micro: Experiment) -> None:
    experiment = _with(micro, "engine.lanes=2", "clients=3")
    method = build(experiment)
    data = load_dataset("sample", experiment.data)
    backend = LocalBackend(method, data.train, [torch.arange(40)] * 3)
    tasks = [Task(1, client, steps, 0.1, 0.0) for client, steps in enumerate((1, 2, 6))]
    replies = list(backend.run(tasks, initial_state(method, "cpu").server, {}, Callback()))
    assert [reply.client for reply in replies] == [1, 0, 2]  # 2 began first and takes as long as both others
    assert [reply.samples for reply in replies] == [2 * 32, 32, 6 * 32]


def test_what_does_not_work_is_left_out_with_one_line(
    micro: Experiment, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(lane: Lane) -> None:
        if lane.step.engine.fused:
            raise RuntimeError("no compiler was found\nand much more")

    monkeypatch.setattr(Lane, "try_out", broken)
    with caplog.at_level(logging.WARNING, "fedu2"):
        backend = _backend(micro, Engine(CPU, fused=True))
    assert not backend.engine.fused
    assert [record.getMessage() for record in caplog.records] == [
        "fused and compiled kernels do not work here (no compiler was found): going on with PyTorch's own"
    ]


def test_an_error_of_the_method_itself_is_not_blamed_on_the_engine(
    micro: Experiment, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(lane: Lane) -> None:
        raise ZeroDivisionError("in the method")

    monkeypatch.setattr(Lane, "try_out", broken)
    with caplog.at_level(logging.WARNING, "fedu2"), pytest.raises(ZeroDivisionError):
        _backend(micro, Engine(CPU, fused=True))
    assert not caplog.records


def test_a_trial_leaves_the_model_as_it_was(micro: Experiment) -> None:
    lane = _backend(micro, Engine(CPU)).lanes[0]
    before = lane.model.params.clone(), lane.model.buffers.clone()
    lane.try_out()
    assert torch.equal(lane.model.params, before[0])
    assert torch.equal(lane.model.buffers, before[1])
    assert lane.history is not None  # it did train


def test_a_step_that_cannot_be_captured_is_launched(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Refusing:
        def register_generator_state(self, generator: torch.Generator) -> None:
            raise RuntimeError("operation not permitted when stream is capturing\nmore")

    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Refusing)
    sizes: list[int] = []
    verdict = Verdict()
    steps = CapturedSteps(sizes.append, None, torch.Generator(), verdict)  # type: ignore[arg-type]
    assert steps.wants(8, 0.0, usual=True)
    with caplog.at_level(logging.WARNING, "fedu2"):
        steps.capture(8, 0.0)
    assert sizes == [8] * capture.WARM_UP
    assert "operation not permitted when stream is capturing)" in caplog.records[0].getMessage()
    assert not steps.wants(8, 0.0, usual=True)
    another = CapturedSteps(sizes.append, None, torch.Generator(), verdict)  # type: ignore[arg-type]
    assert not another.wants(8, 0.0, usual=True)  # and no other lane tries
    steps(8, 0.0)
    assert len(sizes) == capture.WARM_UP + 1


def test_odd_sizes_are_captured_once_they_are_frequent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    steps = CapturedSteps(lambda size: None, None, torch.Generator(), Verdict())  # type: ignore[arg-type]
    for _ in range(WORTH_CAPTURING - 1):
        steps(5, 0.0)
    assert not steps.wants(5, 0.0, usual=False)
    steps(5, 0.0)
    assert steps.wants(5, 0.0, usual=False)
    assert not steps.wants(6, 0.0, usual=False)


def test_the_doctor_examines_and_tries(micro: Experiment) -> None:
    engine, found = findings(micro)
    listed = {finding.what: finding for finding in found}
    assert set(listed) >= {"device", "precision", "engine.graph", "engine.fused", "engine.compile", "engine.lanes"}
    assert all(finding.uses and finding.why for finding in found)
    used, milliseconds = try_out(micro, engine)
    assert used == engine
    assert milliseconds > 0
    assert "torch" in versions()


def _backend(experiment: Experiment, engine: Engine) -> LocalBackend:
    data = load_dataset("sample", experiment.data)
    return LocalBackend(build(resolve(experiment)), data.train, [torch.arange(40)] * 2, engine)


def test_a_failing_lane_stops_the_round(micro: Experiment, monkeypatch: pytest.MonkeyPatch) -> None:
    experiment = _with(micro, "engine.lanes=2", "optimizer.lr=1e30", "local_steps=4", "precision=float32")
    with pytest.raises(TrainingError, match="round 1, client"):
        _replies(experiment)


def _replies(experiment: Experiment) -> list[Reply]:
    method = build(experiment)
    backend = _backend(experiment, replace(choose(experiment, CPU)))
    tasks = [Task(1, client, 4, experiment.optimizer.lr, 0.0) for client in range(2)]
    return list(backend.run(tasks, initial_state(method, "cpu").server, {}, Callback()))
