"""benchmarks/plain_statistics.py: an encoder with the statistics that it has, and with those of plain images."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks.plain_statistics import compare

import fedu2
from fedu2.experiment import Experiment


def test_an_encoder_is_judged_with_either_statistics(micro: Experiment, tmp_path: Path) -> None:
    run = fedu2.train(micro, tmp_path / "run")
    found = compare(run)
    usual, plain = found["scores"]["views of each client"], found["scores"]["plain images of all"]
    assert usual["knn"] == pytest.approx(run.summary["knn"])
    assert plain.keys() == usual.keys() == {"knn", "linear"}
    assert plain != usual
    assert found["round"] == micro.rounds
