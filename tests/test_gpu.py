"""The GPU engine against its plain counterpart: `make test-gpu`. Needs a CUDA device."""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import fedu2
from fedu2.data import load_dataset
from fedu2.engine import Engine
from fedu2.errors import TrainingError
from fedu2.evaluation import knn_accuracy
from fedu2.evaluation.finetune import _Network, _Trainer
from fedu2.evaluation.linear import Labelled, linear_probe
from fedu2.evaluation.options import FinetuneOptions, LinearOptions
from fedu2.experiment import Experiment
from fedu2.federation import capture, lane
from fedu2.federation.callbacks import Callback
from fedu2.federation.local import LocalBackend
from fedu2.federation.optimizers import learning_rate
from fedu2.federation.rounds import initial_state, play_round
from fedu2.methods import Reply, Task, build, methods, resolve
from fedu2.models.base import build_encoder, encoders
from fedu2.models.flat import FlatModel
from fedu2.models.norm import only_our_norms
from fedu2.options import DataOptions

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
PLAIN = ("engine.graph=false", "engine.fused=false", "engine.lanes=1")
STEPS = 3  # rounding errors grow some forty-fold a step, even between two runs of the same code


@pytest.fixture(autouse=True)
def _exact_convolutions(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Full float32 in place of TF32, whose errors are larger than anything here; the same algorithms in each run."""
    monkeypatch.setattr(lane, "_convolutions", lambda searched: contextlib.nullcontext())
    cudnn = torch.backends.cudnn
    with cudnn.flags(True, False, cudnn.benchmark_limit, True, False):
        yield


def _experiment(*settings: str) -> Experiment:
    base = {"dataset": "sample", "encoder": "resnet18", "width": 16, "batch_size": 64, "clients": 3}
    return resolve(Experiment.parse(base, ["optimizer.lr=0.001", "engine.compile=false", *settings]))


def _replies(
    experiment: Experiment, shares: list[Tensor] | None = None, rounds: int = 1, steps: int = STEPS
) -> list[Reply]:
    device = torch.device("cuda")
    data = load_dataset("sample", experiment.data).to(device)
    method = build(experiment)
    shares = shares or [torch.arange(200), torch.arange(200, 420), torch.arange(420, 560)]
    backend = LocalBackend(method, data.train, shares)
    server = initial_state(method, device).server
    replies: list[Reply] = []
    for round_ in range(1, rounds + 1):
        progress = (round_ - 1) / experiment.rounds
        lr = learning_rate(experiment, round_)
        tasks = [Task(round_, client, steps, lr, progress) for client in range(len(shares))]
        replies += sorted(backend.run(tasks, server, {}, Callback()), key=lambda reply: reply.client)
    return replies


def _gap(ours: list[Reply], plain: list[Reply]) -> float:
    """The largest relative difference of any client's mean loss."""
    return max(
        abs(a.metrics["loss"] - b.metrics["loss"]) / abs(b.metrics["loss"]) for a, b in zip(ours, plain, strict=True)
    )


@pytest.mark.parametrize("objective", ["byol", "simclr", "simsiam"])
@pytest.mark.parametrize("fast", ["engine.fused=false", "engine.graph=false", "engine.lanes=1", "engine.lanes=3"])
def test_float32_agrees_with_the_plain_path(objective: str, fast: str) -> None:
    settings = (f"objective={objective}", "precision=float32")
    assert _gap(_replies(_experiment(*settings, fast)), _replies(_experiment(*settings, *PLAIN))) <= 1e-4


@pytest.mark.parametrize("objective", ["byol", "simclr", "simsiam"])
def test_bfloat16_agrees_to_its_accuracy(objective: str) -> None:
    settings = (f"objective={objective}",)
    ours = _replies(_experiment(*settings, "precision=bfloat16"))
    autocast = _replies(_experiment(*settings, "precision=bfloat16", *PLAIN))
    exact = _replies(_experiment(*settings, "precision=float32", *PLAIN))
    assert _gap(ours, exact) <= max(2 * _gap(autocast, exact), 1e-2)


def test_a_captured_step_is_the_launched_one() -> None:
    """Same kernels, same noise."""
    settings = ("precision=bfloat16", "engine.lanes=1")
    captured, launched = _replies(_experiment(*settings)), _replies(_experiment(*settings, "engine.graph=false"))
    assert _gap(captured, launched) <= 1e-4


@pytest.mark.parametrize(
    "settings", [("precision=bfloat16",), ("precision=float32", *PLAIN)], ids=["half precision, captured", "launched"]
)
def test_what_is_not_finite_is_named_with_its_step(settings: tuple[str, ...]) -> None:
    """Nobody waits for a step, but the step is known when an epoch has arrived."""
    told = r"became -?(nan|inf) in round 1, client \d, step [23]$"
    with pytest.raises(TrainingError, match=told):
        _replies(_experiment(*settings, "optimizer.lr=1e30"))


def test_lanes_do_not_disturb_each_other() -> None:
    one, three = (_replies(_experiment(f"engine.lanes={n}", "precision=float32"), rounds=2) for n in (1, 3))
    assert [reply.client for reply in one] == [reply.client for reply in three]
    assert _gap(three, one) <= 1e-4


def test_clients_smaller_than_a_batch(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two steps: in a third, a batch of 17 makes a relative error of 1e-7 in the weights one of 3e-4 in the loss."""
    monkeypatch.setattr(capture, "WORTH_CAPTURING", 4)
    shares = [torch.arange(30), torch.arange(100, 300), torch.arange(300, 317)]
    settings = ("precision=float32", "last_batch=keep")
    with caplog.at_level(logging.WARNING, "fedu2"):
        ours = _replies(_experiment(*settings), shares, rounds=5, steps=2)  # launched first, then captured
    plain = _replies(_experiment(*settings, *PLAIN), shares, rounds=5, steps=2)
    assert [reply.samples for reply in ours] == [reply.samples for reply in plain]
    assert _gap(ours, plain) <= 1e-4
    assert not caplog.records


@pytest.mark.parametrize(
    "schedules",
    [
        ("optimizer.schedule=cosine", "fur.schedule=cosine"),  # one graph for all rounds
        ("optimizer.schedule=cosine", "byol.momentum_schedule=cosine"),  # captured anew in each
    ],
)
def test_a_schedule_reaches_the_captured_step(schedules: tuple[str, ...], caplog: pytest.LogCaptureFixture) -> None:
    """Learning rate, FUR's weight and BYOL's momentum change from round to round; so must what is replayed."""
    settings = ("method=fedu2", "precision=float32", "byol.momentum=0.5", "rounds=3", *schedules)
    with caplog.at_level(logging.WARNING, "fedu2"):
        ours, plain = _replies(_experiment(*settings), rounds=3), _replies(_experiment(*settings, *PLAIN), rounds=3)
    assert _gap(ours, plain) <= 1e-4
    # λ_U is a factor of the loss: a frozen one would be seen there first.
    losses = [[reply.metrics["loss"] for reply in replies] for replies in (ours, plain)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    assert not caplog.records


@pytest.mark.parametrize("name", ["adam", "adamw"])
def test_other_optimizers(name: str) -> None:
    settings = ("precision=float32", f"optimizer.name={name}", "optimizer.lr=1e-4")
    assert _gap(_replies(_experiment(*settings)), _replies(_experiment(*settings, *PLAIN))) <= 1e-4


@pytest.mark.parametrize(
    ("name", "objective"), [(name, objective) for name in methods for objective in methods[name].objectives]
)
def test_every_method_takes_the_fast_path(name: str, objective: str, caplog: pytest.LogCaptureFixture) -> None:
    """Two rounds, captured, in three lanes; the first one's losses are those of the plain path."""
    settings = (f"method={name}", f"objective={objective}", "precision=float32", "local_steps=2", "rounds=2")
    device = torch.device("cuda")
    first = []
    for more in ((), PLAIN):
        experiment = _experiment(*settings, *more)
        method = build(experiment)
        shares = [torch.arange(200), torch.arange(200, 420), torch.arange(420, 560)]
        backend = LocalBackend(method, load_dataset("sample", experiment.data).to(device).train, shares)
        state = initial_state(method, device)
        with caplog.at_level(logging.WARNING, "fedu2"):
            for _ in range(1 if more else 2):
                state, record = play_round(state, method, backend, [200, 220, 140], Callback())
                first += [record["client_loss"]] if record["round"] == 1 else []
        if not more:
            assert backend.engine.graph
            assert backend.engine.fused
            assert all(lane.captured and lane.captured.graphs for lane in backend.lanes)
    assert first[0] == pytest.approx(first[1], rel=1e-4)
    assert not caplog.records


class Strange(nn.Module):
    """An encoder with norms of its own; with `look` it reads a value on the host, which no graph can capture."""

    def __init__(self, look: bool) -> None:
        super().__init__()
        self.features, self.look = 16, look
        self.body = nn.Sequential(nn.Conv2d(3, 16, 3, 2), nn.BatchNorm2d(16), nn.ReLU(), nn.AdaptiveAvgPool2d(1))

    def forward(self, x: Tensor) -> Tensor:
        if self.look and float(x.sum()) > 1e30:
            x = -x
        return self.body(x).flatten(1)


@pytest.fixture(params=[False, True], ids=["captured", "launched"])
def strange(request: pytest.FixtureRequest) -> str:
    name = f"strange-{request.param}"
    if name not in encoders:
        encoders.register(name)(lambda width: Strange(request.param))
    return name


@pytest.mark.parametrize("compiled", ["false", "true"])
def test_an_encoder_of_ones_own(strange: str, compiled: str, caplog: pytest.LogCaptureFixture) -> None:
    settings = (f"encoder={strange}", "precision=float32", "width=null")
    with caplog.at_level(logging.WARNING, "fedu2"):
        ours = _replies(_experiment(*settings, f"engine.compile={compiled}"))
    assert _gap(ours, _replies(_experiment(*settings, *PLAIN))) <= 1e-4
    told = [record.getMessage() for record in caplog.records if record.name == "fedu2"]  # the compiler tells its own
    assert len(told) == (strange == "strange-True")
    assert all("cannot be captured in a CUDA graph" in line for line in told)
    assert not only_our_norms(Strange(False))


def test_a_run_resumes_on_the_gpu(tmp_path: Path) -> None:
    experiment = _experiment("rounds=2", "local_epochs=1", "evaluation.every=0")
    whole = fedu2.train(experiment, tmp_path / "whole")
    fedu2.train(experiment.with_(rounds=1), tmp_path / "run")
    resumed = fedu2.train(experiment, tmp_path / "run", resume=True)
    assert resumed.history[-1]["loss"] == pytest.approx(whole.history[-1]["loss"], rel=0.05)
    assert whole.summary["environment"]["device"].startswith("cuda")


def test_knn_on_the_gpu_is_that_on_the_cpu() -> None:
    generator = torch.Generator().manual_seed(0)
    bank, queries = torch.randn(3000, 64, generator=generator), torch.randn(700, 64, generator=generator)
    labels, truth = torch.arange(3000) % 10, torch.arange(700) % 10
    here = knn_accuracy(queries, truth, bank, labels)
    there = knn_accuracy(queries.cuda(), truth.cuda(), bank.cuda(), labels.cuda())
    assert there == pytest.approx(here, abs=0.3)  # ties between nearly equal votes


def test_a_captured_linear_probe_is_the_launched_one() -> None:
    generator = torch.Generator().manual_seed(0)
    labels = (torch.arange(1500) % 5).cuda()
    features = (
        torch.randn(5, 32, generator=generator).cuda()[labels] + torch.randn(1500, 32, generator=generator).cuda()
    )
    train, test = Labelled(features[:1000], labels[:1000]), Labelled(features[1000:], labels[1000:])
    options = LinearOptions(epochs=5, batch_size=96)
    captured = linear_probe(train, test, 5, options, [0, 1])
    assert captured == pytest.approx(linear_probe(train, test, 5, options, [0, 1], graph=False), abs=0.21)
    assert min(captured) > 50


def test_captured_fine_tuning_is_the_launched_one(caplog: pytest.LogCaptureFixture) -> None:
    few = load_dataset("sample", DataOptions()).train.subset(torch.arange(330)).to("cuda")
    torch.manual_seed(0)
    network = _Network(build_encoder("resnet18", 16), 10)
    start = FlatModel(copy.deepcopy(network), "cuda").params.clone()
    ends = []
    for graph in (True, False):
        engine = Engine(torch.device("cuda"), graph=graph)
        trainer = _Trainer(copy.deepcopy(network), few, FinetuneOptions(), engine, seed=0, encoder_lr=0.001)
        trainer.train(1)
        ends.append(trainer.model.params.clone())
    assert (ends[0] - ends[1]).norm() < 0.02 * (ends[1] - start).norm()
    assert not caplog.records
