"""benchmarks/one_round.py: the updates of one round, aggregated in many ways."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from benchmarks.one_round import by_section, calibrate, candidates, compare
from torch import nn

import fedu2
from fedu2.aggregators import Buffers, Updates
from fedu2.aggregators.eua import eua
from fedu2.experiment import Experiment
from fedu2.models.flat import FlatModel
from fedu2.options import EUAOptions
from fedu2.views import plain_view


def _updates(module: nn.Module) -> Updates:
    """Of three clients that moved at random."""
    model = FlatModel(module)
    torch.manual_seed(0)
    start, buffers = model.params.clone(), model.buffers.clone()
    shares = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    moved = Buffers(buffers, buffers + torch.rand(3, len(buffers)), model.buffer_layout)
    return Updates(start, start + torch.randn(3, len(start)), shares, moved, model.layout)


def test_candidates_are_what_their_names_say() -> None:
    updates = _updates(nn.Sequential(nn.Linear(4, 5, bias=False), nn.BatchNorm1d(5)))
    found = {candidate.name: candidate.model.params for candidate in candidates(updates) if not candidate.calibrate}
    mean = updates.shares.float() @ updates.clients
    torch.testing.assert_close(found["before"], updates.start)
    torch.testing.assert_close(found["fedavg, server.lr=1"], mean)
    torch.testing.assert_close(found["fedavg, server.lr=2"], 2 * mean - updates.start)
    torch.testing.assert_close(found["client 2"], updates.clients[2])
    raw = eua(EUAOptions(guard=None))
    for entry in updates.layout.entries:
        part = slice(entry.start, entry.stop)
        alone = raw(Updates(updates.start[part], updates.clients[:, part].clone(), updates.shares)).params
        torch.testing.assert_close(found["eua by tensor, guard=None"][part], alone)
    whole = raw(Updates(updates.start, updates.clients.clone(), updates.shares)).params
    torch.testing.assert_close(found["eua, guard=None"], whole)
    assert not torch.equal(found["eua by tensor, guard=None"], whole)


def test_sections_agree_each_for_itself() -> None:
    updates = _updates(nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3)))
    span = updates.layout.span("1")
    updates.clients[:, span] = updates.start[span] + 1  # all clients alike
    found = by_section(updates)
    assert found["1"] == pytest.approx(1)
    assert found["0"] == pytest.approx(0, abs=0.5)


def test_statistics_of_ones_own_are_those_of_the_images() -> None:
    images = torch.randint(0, 256, (64, 3, 4, 4), dtype=torch.uint8)
    norm = nn.BatchNorm2d(3, momentum=0.2)
    calibrate(norm, images, 16)
    torch.testing.assert_close(norm.running_mean, plain_view(images).mean((0, 2, 3)))
    assert norm.momentum == 0.2


def test_a_run_is_compared_by_knn(micro: Experiment, tmp_path: Path) -> None:
    run = fedu2.train(micro, tmp_path / "run")
    found = compare(run)
    assert found["round"] == 3
    assert found["knn"]["before"] == pytest.approx(run.summary["knn"])
    assert set(found["knn"]) >= {"eua, guard=3.0", "fedavg, server.lr=1.5, own statistics", "client 2"}
    assert sum(found["images"]) == 4000
