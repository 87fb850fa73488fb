"""What a run uses of a machine: decisions, fallbacks, and lanes that change nothing. Runs without a GPU."""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

import fedu2
from fedu2 import engine as engines
from fedu2.data import load_dataset
from fedu2.doctor import findings, try_out, versions
from fedu2.engine import Engine, choose, choose_device, choose_threads, without_graph
from fedu2.errors import TrainingError, UsageError
from fedu2.experiment import Experiment
from fedu2.federation import capture, step
from fedu2.federation.backend import EpochReport
from fedu2.federation.callbacks import Callback
from fedu2.federation.capture import WORTH_CAPTURING, CapturedSteps
from fedu2.federation.lane import Lane
from fedu2.federation.local import LocalBackend, _Queue
from fedu2.federation.rounds import initial_state
from fedu2.federation.step import HalfWeights
from fedu2.methods import Batch, Learner, Memory, Method, Reply, Task, build, resolve
from fedu2.models.base import encoders
from fedu2.models.flat import FlatModel
from fedu2.models.norm import Norm
from fedu2.views import training_views

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


@pytest.mark.parametrize("name", ["hpu", "meta", "vulkan", "nonsense", "mtia"])
def test_devices_that_cannot_be_used_are_refused_in_one_sentence(name: str) -> None:
    with pytest.raises(UsageError, match=rf"^device={name} cannot be used on this machine: [^\n]+$"):
        choose_device(name)


def test_a_missing_gpu_is_called_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for name in ("cuda", "cuda:1"):
        with pytest.raises(
            UsageError, match=f"device={name} cannot be used on this machine: PyTorch finds no cuda device"
        ):
            choose_device(name)
    assert choose_device("auto") == choose_device("cpu") == CPU


def test_threads_leave_busy_cores_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    counts = {}
    for cores, idle in ((8, 8.0), (8, 7.6), (8, 5.0), (8, 0.4), (8, 0.0), (2.5, 8.0)):
        monkeypatch.setattr(engines, "usable_cores", lambda cores=cores: cores)
        monkeypatch.setattr(engines, "idle_cores", lambda idle=idle: idle)
        counts[cores, idle] = choose_threads("auto")[0]
    assert list(counts.values()) == [8, 8, 5, 1, 1, 2]
    assert choose_threads(3) == (3, "asked for by engine.threads=3")
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert choose_threads("auto") == (2, "asked for by OMP_NUM_THREADS=2")


def test_idle_cores_are_counted_among_the_own_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Core 0 is half idle, core 1 busy, core 2 idle but not ours; the fourth and fifth number count idle ticks."""
    states = iter(
        [
            "cpu 0 0 0 0 0 0 0 0\ncpu0 100 0 0 100 0 0 0 0\ncpu1 100 0 0 100 0 0 0 0\ncpu2 0 0 0 0 0 0 0 0\nintr 5",
            "cpu 0 0 0 0 0 0 0 0\ncpu0 110 0 0 105 5 0 0 0\ncpu1 120 0 0 100 0 0 0 0\ncpu2 0 0 0 20 0 0 0 0\nintr 6",
        ]
    )
    monkeypatch.setattr(engines, "own_cores", lambda: {0, 1})
    monkeypatch.setattr(engines.Path, "read_text", lambda path, encoding: next(states))
    assert engines.idle_cores(0.0) == pytest.approx(0.5)
    monkeypatch.setattr(engines.Path, "read_text", lambda path, encoding: "nothing of use")
    assert engines.idle_cores(0.0) == 2.0


@pytest.mark.parametrize(("text", "cores"), [("max 100000", 4.0), ("150000 100000", 1.5), ("900000 100000", 4.0)])
def test_a_containers_quota_counts(monkeypatch: pytest.MonkeyPatch, text: str, cores: float) -> None:
    monkeypatch.setattr(engines, "own_cores", lambda: {0, 1, 2, 3})
    monkeypatch.setattr(engines.Path, "read_text", lambda path, encoding: text)
    assert engines.usable_cores() == cores


def test_a_gpu_without_bfloat16_gets_float32_and_few_clients_few_lanes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (7, 5))
    cuda = torch.device("cuda")
    old = choose(Experiment(), cuda)
    assert (old.precision, old.graph) == (torch.float32, True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    assert choose(Experiment(), cuda).precision == torch.bfloat16
    lanes = {
        participation: choose(Experiment.parse({"clients": 10, "participation": participation}), cuda).lanes
        for participation in (1.0, 0.3, 0.2)
    }
    assert lanes == {1.0: engines.LANES, 0.3: engines.LANES, 0.2: 1}


def test_a_run_keeps_its_number_of_threads(micro: Experiment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", asked.append)  # two on busy cores take half a minute
    micro = _with(micro, "data.image_size=8", "local_steps=1")
    run = fedu2.train(_with(micro, "engine.threads=2", "rounds=1"), tmp_path / "run")
    assert run.experiment.engine.threads == 2
    longer = fedu2.train(_with(micro, "engine.threads=auto", "rounds=2"), run.path, resume=True)
    assert longer.experiment.engine.threads == 2
    assert asked == [2, 2]


@pytest.mark.parametrize(("method", "lanes"), [("fedu2", 3), ("fedbyol", 2)])
def test_lanes_change_nothing(micro: Experiment, tmp_path: Path, method: str, lanes: int) -> None:
    few = ("data.validation=0.75", "local_steps=epochs", "local_epochs=1", "clients=4")
    experiment = _with(micro, f"method={method}", *few)
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


def test_clients_smaller_than_a_batch_are_for_the_first_lane(micro: Experiment) -> None:
    experiment = _with(micro, "engine.lanes=2", "clients=5")
    data = load_dataset("sample", experiment.data)
    shares = [torch.arange(n) for n in (40, 10, 64, 20, 96)]
    lanes = LocalBackend(build(experiment), data.train, shares).lanes
    tasks = [Task(1, client, steps, 0.1, 0.0) for client, steps in enumerate((1, 1, 2, 1, 3))]
    waiting = _Queue(tasks, lanes)
    turns = [lanes[1], lanes[0], lanes[0], lanes[1], lanes[0]]
    assert [waiting.pop(lane).client for lane in turns] == [4, 1, 3, 2, 0]
    left = _Queue(tasks[1:3], lanes)
    assert [left.pop(lanes[1]).client for _ in range(2)] == [2, 1]  # the second lane, too, when nothing else is left
    assert not left
    alone = _Queue(tasks, lanes[:1])
    assert [alone.pop(lanes[0]).client for _ in tasks] == [0, 1, 2, 3, 4]


def _break_fused_views(monkeypatch: pytest.MonkeyPatch, *, plain_too: bool) -> None:
    def broken(*arguments: Any, fused: bool, **options: Any) -> tuple[Tensor, Tensor]:
        if fused or plain_too:
            raise RuntimeError("no compiler was found\nand much more")
        return training_views(*arguments, fused=fused, **options)

    monkeypatch.setattr(step, "training_views", broken)


def test_what_does_not_work_is_left_out_with_one_line(
    micro: Experiment, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    _break_fused_views(monkeypatch, plain_too=False)
    with caplog.at_level(logging.WARNING, "fedu2"):
        backend = _backend(micro, Engine(CPU, fused=True, lanes=2))
    assert not backend.engine.fused
    assert not any(lane.step.engine.fused for lane in backend.lanes)
    assert [record.getMessage() for record in caplog.records] == [
        "fused and compiled kernels do not work here (no compiler was found): going on with PyTorch's own"
    ]


def test_an_error_that_remains_is_not_blamed_on_the_engine(
    micro: Experiment, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    _break_fused_views(monkeypatch, plain_too=True)
    with caplog.at_level(logging.WARNING, "fedu2"), pytest.raises(RuntimeError, match="no compiler"):
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
    steps = CapturedSteps(sizes.append, None, torch.Generator())  # type: ignore[arg-type]
    assert steps.wants(8, 0.0, usual=True)
    with caplog.at_level(logging.WARNING, "fedu2"):
        steps.capture(8, 0.0)
    assert sizes == [8] * capture.WARM_UP
    assert "operation not permitted when stream is capturing)" in caplog.records[0].getMessage()
    assert not steps.wants(8, 0.0, usual=True)
    steps(8, 0.0)
    assert len(sizes) == capture.WARM_UP + 1


def test_without_captured_steps_one_lane_remains() -> None:
    chosen = Engine(torch.device("cpu"), graph=True, lanes=3, reasons={"graph": "", "lanes": ""})
    left = without_graph(chosen, Experiment())
    assert (left.graph, left.lanes, left.reasons["graph"]) == (False, 1, "this step cannot be captured")
    assert without_graph(chosen, Experiment.parse({"engine": {"lanes": 2}})).lanes == 2


def test_half_precision_copies_stand_in_for_the_weights(micro: Experiment) -> None:
    method = build(_with(micro, "objective=byol"))
    views = torch.randn(2, 8, 3, 16, 16, generator=torch.Generator().manual_seed(0))

    def gradients(use_copies: bool) -> list[Tensor]:
        model = FlatModel(method.learner())
        half = HalfWeights(model)
        holders = half.holders(model.gradients()) if use_copies else model.gradients()
        with half.in_use() if use_copies else contextlib.nullcontext():
            with torch.autocast("cpu", torch.bfloat16):
                loss, _ = method.loss(model.module, Batch(views[0], views[1]), torch.Generator().manual_seed(1))
            loss.backward()
        assert all(parameter.dtype == torch.float32 for parameter in model.module.parameters())
        return [holder.grad.float() for holder, _ in holders if holder.grad is not None]

    ours, autocast = gradients(True), gradients(False)
    assert len(ours) == len(autocast) > 10
    for mine, theirs in zip(ours, autocast, strict=True):
        assert torch.allclose(mine, theirs, rtol=0.05, atol=0.02 * float(theirs.abs().max()))


@pytest.mark.parametrize(("settings", "casts"), [((), 1), (("rotation.weight=1",), 2), (("heads.out=13",), 3)])
def test_half_precision_copies_lie_where_tensor_cores_can_read_them(settings: tuple[str, ...], casts: int) -> None:
    """A head of 4 outputs, or an odd number of them, must not shift what comes after it."""
    experiment = resolve(Experiment.parse({"method": "fedbyol", "width": 8}, settings))
    model = FlatModel(build(experiment).learner())
    half = HalfWeights(model)
    with half.in_use():
        copies = dict(model.module.named_parameters())
    assert len(half.stretches) == casts
    for name, master in model.module.named_parameters():
        copy = copies[name]
        if copy.dtype == torch.bfloat16:
            assert copy.data_ptr() % 16 == half.vector.data_ptr() % 16, name
            assert torch.equal(copy, master.bfloat16()), name
            assert copy.stride() == master.stride()


def test_a_refused_capture_leaves_a_fresh_generator(micro: Experiment) -> None:
    """The old one would still believe that it is being captured."""

    class Refusing:
        refusal: str | None = None

        def wants(self, size: int, tempo: float, usual: bool) -> bool:
            return self.refusal is None

        def capture(self, size: int, tempo: float) -> None:
            self.refusal = "no"

    lane = _backend(micro, Engine(CPU)).lanes[0]
    lane.captured, before = Refusing(), lane.step.noise  # type: ignore[assignment]
    assert not lane.can_capture()
    assert lane.step.noise is not before


def test_weights_are_put_back_after_an_error(micro: Experiment) -> None:
    model = FlatModel(build(resolve(micro)).learner())
    masters = [id(parameter) for parameter in model.module.parameters()]
    half = HalfWeights(model)

    def failing() -> None:
        assert any(parameter.dtype == torch.bfloat16 for parameter in model.module.parameters())
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), half.in_use():
        failing()
    assert [id(parameter) for parameter in model.module.parameters()] == masters


class Tied(nn.Module):
    """One weight with two readers, a table of integers, and a counter."""

    features = 8

    def __init__(self) -> None:
        super().__init__()
        self.reduce = nn.Linear(3, 8)
        self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 8)
        self.two.weight = self.one.weight
        self.register_buffer("table", torch.arange(8))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        x = self.reduce(x.mean((2, 3)))[:, self.table]
        return self.two(self.one(x).relu()) + self.calls / 100


encoders.register("tied")(lambda width: Tied())


def test_tied_weights_have_one_copy_and_integers_start_afresh(micro: Experiment) -> None:
    experiment = _with(micro, "encoder=tied", "width=null")
    method = build(experiment)
    model = FlatModel(method.learner())
    half = HalfWeights(model)
    with half.in_use():
        assert model.module.encoder.one.weight is model.module.encoder.two.weight
        assert model.module.encoder.one.weight.dtype == torch.bfloat16
    both, alone = (
        {reply.client: reply for reply in _replies(_with(experiment, f"engine.lanes={lanes}"))} for lanes in (1, 2)
    )
    assert both[1].metrics == alone[1].metrics  # whoever trained before in the same lane


def test_only_encoders_that_keep_views_apart_see_them_stacked(micro: Experiment) -> None:
    ours = _backend(micro, Engine(CPU, fused=True)).lanes[0].step.learner
    assert ours.paired
    foreign = _backend(_with(micro, "encoder=tied", "width=null"), Engine(CPU, fused=True)).lanes[0].step.learner
    assert not foreign.paired
    assert all(child.fused for child in foreign.modules() if isinstance(child, Norm))


def test_what_is_compiled_has_no_hand_written_kernels(micro: Experiment, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nn.Module, "compile", lambda module: None)
    step_of = _backend(_with(micro, "encoder=tied", "width=null"), Engine(CPU, fused=True, compile=True)).lanes[0].step
    norms = [child for child in step_of.learner.modules() if isinstance(child, Norm)]
    assert norms
    assert not any(norm.fused for norm in norms)


def test_a_run_keeps_its_precision(micro: Experiment, tmp_path: Path) -> None:
    run = fedu2.train(_with(micro, "precision=bfloat16", "rounds=1"), tmp_path / "run")
    longer = fedu2.train(_with(micro, "precision=auto", "rounds=2"), run.path, resume=True)
    assert longer.experiment.precision == "bfloat16"
    assert fedu2.train(_with(micro, "rounds=1"), tmp_path / "auto").experiment.precision == "float32"
    assert run.summary["environment"]["engine"] == "the CPU, bfloat16"


class _Graph:
    """Stands in for a CUDA graph: remembers what was captured and whose noise it draws, and replays a list."""

    made: ClassVar[list[_Graph]] = []

    def __init__(self) -> None:
        self.noise: torch.Generator | None = None
        self.replays = 0
        _Graph.made.append(self)

    def register_generator_state(self, generator: torch.Generator) -> None:
        self.noise = generator

    def replay(self) -> None:
        self.replays += 1


@pytest.fixture
def fake_graphs(monkeypatch: pytest.MonkeyPatch) -> type[_Graph]:
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", _Graph)
    monkeypatch.setattr(torch.cuda, "graph", lambda *arguments, **options: contextlib.nullcontext())
    _Graph.made.clear()
    return _Graph


def test_graphs_go_by_size_and_tempo(fake_graphs: type[_Graph]) -> None:
    launched: list[int] = []
    noise = torch.Generator()
    steps = CapturedSteps(launched.append, None, noise)  # type: ignore[arg-type]
    steps.capture(8, 0.9)
    steps.capture(5, 0.9)
    eight, five = fake_graphs.made
    assert eight.noise is five.noise is noise
    launched.clear()
    steps(8, 0.9)
    steps(5, 0.9)
    steps(5, 0.9)
    assert (eight.replays, five.replays, launched) == (1, 2, [])
    steps(8, 0.95)  # another momentum: not the step that was captured
    assert (eight.replays, launched) == (1, [8])
    steps.capture(8, 0.95)
    assert len(steps.graphs) == 1  # those of the former momentum are gone
    assert steps.wants(5, 0.9, usual=True)


def test_too_little_memory_is_no_reason_to_go_on(fake_graphs: type[_Graph]) -> None:
    def full(size: int) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    steps = CapturedSteps(full, None, torch.Generator())  # type: ignore[arg-type]
    with pytest.raises(torch.OutOfMemoryError):
        steps.capture(8, 0.0)
    assert steps.refusal is None


def test_a_trial_that_runs_out_of_memory_stops(micro: Experiment, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(lane: Lane) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(Lane, "try_out", full)
    with pytest.raises(torch.OutOfMemoryError):
        _backend(micro, Engine(CPU, compile=True))


def test_what_a_method_leaves_behind_does_not_reach_the_next_client(micro: Experiment) -> None:
    """A payload that judges the model in evaluation mode and clears gradients; lanes must not matter."""

    class Careless(Method):
        def payload(self, model: Learner, task: Task) -> Memory:
            model.module.eval()
            model.module.zero_grad()
            return {}

    experiment = _with(micro, "clients=3")
    plain = build(experiment)
    careless = Careless(experiment, plain.aggregator, plain.regularizers, plain.stays)
    data = load_dataset("sample", experiment.data)
    found = []
    for method in (plain, careless):
        backend = LocalBackend(method, data.train, [torch.arange(40)] * 3, Engine(CPU))
        tasks = [Task(1, client, 3, 0.1, 0.0) for client in range(3)]
        replies = backend.run(tasks, initial_state(method, "cpu").server, {}, Callback())
        found.append([reply.metrics["loss"] for reply in replies])
    assert found[0] == found[1]


def test_each_epoch_is_reported_with_its_own_losses(micro: Experiment) -> None:
    heard: list[EpochReport] = []

    class Listening(Callback):
        def on_epoch(self, report: EpochReport) -> None:
            heard.append(report)

    backend = _backend(micro, Engine(CPU))
    server = initial_state(build(resolve(micro)), "cpu").server
    reply = next(iter(backend.run([Task(1, 0, 3, 0.1, 0.0)], server, {}, Listening())))  # 40 images, one batch an epoch
    losses = [report.terms["loss"] for report in heard]
    assert [report.steps for report in heard] == [1, 2, 3]
    assert len(set(losses)) == 3
    assert reply.metrics["loss"] == pytest.approx(sum(losses) / 3)


def test_a_client_sees_another_order_in_every_round(micro: Experiment, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[int]] = []

    def watched(images: Tensor, indices: Tensor, *arguments: Any, **options: Any) -> tuple[Tensor, Tensor]:
        seen.append(indices.tolist())
        return training_views(images, indices, *arguments, **options)

    monkeypatch.setattr(step, "training_views", watched)
    backend = _backend(micro, Engine(CPU))
    server = initial_state(build(resolve(micro)), "cpu").server
    for round_ in (1, 2, 1):
        list(backend.run([Task(round_, 0, 1, 0.1, 0.0)], server, {}, Callback()))
    assert seen[0] == seen[2] != seen[1]


def test_half_precision_is_another_precision(micro: Experiment) -> None:
    exact, rough = (
        _replies(_with(micro, f"precision={precision}"))[0].metrics["loss"] for precision in ("float32", "bfloat16")
    )
    assert exact != rough
    assert rough == pytest.approx(exact, rel=0.05)


def test_odd_sizes_are_captured_once_they_are_frequent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    steps = CapturedSteps(lambda size: None, None, torch.Generator())  # type: ignore[arg-type]
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


def test_a_failing_lane_stops_the_round(micro: Experiment) -> None:
    experiment = _with(micro, "engine.lanes=2", "optimizer.lr=1e30", "local_steps=4", "precision=float32")
    with pytest.raises(TrainingError, match="round 1, client"):
        _replies(experiment)


def _replies(experiment: Experiment) -> list[Reply]:
    method = build(experiment)
    backend = _backend(experiment, choose(experiment, CPU))
    tasks = [Task(1, client, 4, experiment.optimizer.lr, 0.0) for client in range(2)]
    return list(backend.run(tasks, initial_state(method, "cpu").server, {}, Callback()))
