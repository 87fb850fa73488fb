"""Runs in slices of time."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import fedu2
from fedu2.cli import main
from fedu2.experiment import Experiment
from fedu2.federation.deadline import Deadline

MICRO = ("data.image_size=16", "clients=2", "width=4", "local_steps=2", "rounds=3", "evaluation.every=0")


def test_a_run_in_slices_is_the_whole_run(micro: Experiment, tmp_path: Path) -> None:
    experiment = micro.with_(rounds=3, checkpoint_every=100)
    whole = fedu2.train(experiment, tmp_path / "whole")
    slices = [fedu2.train(experiment, tmp_path / "run", resume=i > 0, time_limit=0.0) for i in range(3)]
    assert [run.rounds_played for run in (fedu2.Run(tmp_path / "run"), whole)] == [3, 3]
    assert whole.finished
    assert slices[-1].finished
    ours, theirs = (run.encoder().state_dict() for run in (slices[-1], whole))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert [r["loss"] for r in slices[-1].history[1:]] == [r["loss"] for r in whole.history[1:]]


def test_a_slice_stops_after_a_round_with_a_checkpoint(micro: Experiment, tmp_path: Path) -> None:
    run = fedu2.train(micro.with_(rounds=5, checkpoint_every=100), tmp_path / "run", time_limit=0.0)
    assert not run.finished
    assert run.rounds_played == 1  # the first is always played, or a run would never end
    assert not (run.path / "summary.json").exists()


def test_a_run_that_is_taken_further_is_not_finished(micro: Experiment, tmp_path: Path) -> None:
    fedu2.train(micro.with_(rounds=1), tmp_path / "run")
    longer = fedu2.train(micro.with_(rounds=3), tmp_path / "run", resume=True, time_limit=0.0)
    assert not longer.finished
    assert longer.rounds_played == 2


def test_the_command_says_how_to_go_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    assert main(["train", "--time-limit", "0", "--out", str(run), *MICRO]) == 75
    error = capsys.readouterr().err
    assert "the time limit came after round 1 of 3; continue with: fedu2 train --resume --out" in error
    assert main(["train", "--resume", "--out", str(run)]) == 0


def test_the_comparison_has_what_is_left(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    assert main(["train", "--out", str(run), *MICRO]) == 0
    assert main(["train", "--resume", "--compare", "--time-limit", "0", "--out", str(run)]) == 75
    assert "round 1 of 3; continue with: fedu2 train --resume --compare" in capsys.readouterr().err


def test_a_lap_is_taken_to_last_as_long_as_the_longest(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    deadline = Deadline(10.0)
    now = 3.0
    deadline.start()
    assert not deadline.reached()
    now = 6.0
    deadline.lap()
    assert not deadline.reached()  # 4 s are left, and a lap took 3
    now = 7.5
    deadline.lap()
    assert deadline.reached()
    assert deadline.left == 2.5
    assert not Deadline(None).reached()
