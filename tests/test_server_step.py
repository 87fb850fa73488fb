"""The server's step: factor and momentum on what the aggregator found."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import fedu2
from fedu2.errors import TrainingError
from fedu2.experiment import Experiment
from fedu2.federation.server_step import step
from fedu2.methods import build, resolve
from fedu2.options import ServerOptions

START, FOUND = torch.tensor([1.0, 2.0]), torch.tensor([2.0, 0.0])  # the aggregator moved by (1, −2)
BEFORE = torch.tensor([4.0, 4.0])


def _last(run: Path, name: str) -> Path:
    return max((run / "checkpoint").glob("round-*")) / name


def _with(experiment: Experiment, *settings: str) -> Experiment:
    return Experiment.parse(experiment.flat(), list(settings))


@pytest.mark.parametrize(
    ("options", "velocity", "params", "after"),
    [
        ({"lr": 1.5}, None, (2.5, -1.0), None),
        ({"lr": 0.5, "momentum": 0.25}, None, (1.5, 1.0), (1.0, -2.0)),
        ({"lr": 0.5, "momentum": 0.25}, BEFORE, (2.0, 1.5), (2.0, -1.0)),
        ({"momentum": 0.75}, BEFORE, (5.0, 3.0), (4.0, 1.0)),
    ],
)
def test_by_hand(
    options: dict[str, float],
    velocity: torch.Tensor | None,
    params: tuple[float, float],
    after: tuple[float, float] | None,
) -> None:
    found, kept = step(START, FOUND, velocity, ServerOptions(**options))
    assert found.tolist() == list(params)
    assert kept is None if after is None else kept is not None and kept.tolist() == list(after)


def test_by_default_the_aggregate_is_taken_as_it_is() -> None:
    assert step(START, FOUND, None, ServerOptions()) == (FOUND, None)


def test_the_first_step_of_a_run_is_its_factor_times_that_of_the_aggregator(micro: Experiment, tmp_path: Path) -> None:
    """Momentum has nothing to add yet; batch-norm buffers take no step."""
    plain, doubled = (
        fedu2.train(
            _with(micro, "rounds=1", f"server.lr={lr}", f"server.momentum={beta}"), tmp_path / f"{lr}"
        ).learner()
        for lr, beta in ((1, 0), (2, 0.9))
    )
    begun, twice = build(resolve(micro)).learner().state_dict(), doubled.state_dict()
    moved = 0
    for name, tensor in plain.state_dict().items():
        if "running" in name:
            assert torch.equal(twice[name], tensor)
        elif tensor.is_floating_point():
            torch.testing.assert_close(twice[name] - begun[name], 2 * (tensor - begun[name]), atol=1e-6, rtol=1e-4)
            moved += bool((tensor != begun[name]).any())
    assert moved > 5


def test_momentum_goes_on_where_a_run_was_stopped(micro: Experiment, tmp_path: Path) -> None:
    experiment = _with(micro, "rounds=3", "server.momentum=0.5")
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
