"""benchmarks/turns.py: where the server overshoots."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from benchmarks import turns

import fedu2
from fedu2.experiment import Experiment

SETTINGS = [
    "dataset=sample",
    "data.image_size=16",
    "clients=3",
    "encoder=tiny",
    "width=4",
    "method=fedbyol",
    "rounds=3",
    "local_steps=2",
    "server.lr=2",
    "evaluation.every=3",
    "device=cpu",
]


def test_figures_of_a_move() -> None:
    sent, move = torch.tensor([3.0, 4.0]), torch.tensor([0.0, 1.0])
    assert turns._figures(sent, move, None, 0.5) == {"length": 0.2, "agreement": 0.5}
    assert turns._figures(sent, move, -2 * move, None) == {"length": 0.2, "turn": -1.0}
    assert turns._figures(sent, move, torch.tensor([7.0, 0.0]), None)["turn"] == 0


def test_a_run_is_watched_as_it_is_played(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    turns.main([*SETTINGS, "--out", str(tmp_path / "turns.json")])
    found = json.loads((tmp_path / "turns.json").read_text())
    run = fedu2.train(Experiment.parse({}, SETTINGS), tmp_path / "run")
    assert found["rounds"][-1]["knn"] == pytest.approx(run.summary["knn"])  # watching changes nothing
    tensors = found["rounds"][-1]["tensors"]
    assert "encoder.stem.0.weight" in tensors
    assert not any(name.startswith("target") for name in tensors)  # which stays at the clients
    assert all({"turn", "agreement", "length"} <= figures.keys() for figures in tensors.values())
    assert "turn" not in found["rounds"][0]["tensors"]["encoder.stem.0.weight"]
    assert "encoder.stem.0.weight" in capsys.readouterr().out
