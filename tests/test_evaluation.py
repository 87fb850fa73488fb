from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from fedu2.evaluation import alignment, effective_rank, knn_accuracy, knn_predict, spectrum, uniformity


def _loop_knn(queries, bank, labels, classes, k, temperature):
    queries, bank = F.normalize(queries, dim=1), F.normalize(bank, dim=1)
    predictions = []
    for q in queries:
        similarity = [float(q @ b) for b in bank]
        nearest = sorted(range(len(bank)), key=lambda i: -similarity[i])[:k]
        votes = [0.0] * classes
        for i in nearest:
            votes[int(labels[i])] += math.exp(similarity[i] / temperature)
        predictions.append(votes.index(max(votes)))
    return torch.tensor(predictions)


@pytest.mark.parametrize(("k", "temperature"), [(1, 0.1), (5, 0.1), (7, 1.0), (500, 0.5)])
def test_knn_against_a_loop(k: int, temperature: float) -> None:
    torch.manual_seed(k)
    bank, labels, queries = torch.randn(60, 8), torch.randint(0, 4, (60,)), torch.randn(30, 8)
    expected = _loop_knn(queries, bank, labels, 4, k, temperature)
    assert torch.equal(knn_predict(queries, bank, labels, 4, k, temperature), expected)


def test_knn_chunks_do_not_matter_and_low_temperatures_do_not_overflow() -> None:
    torch.manual_seed(0)
    bank, labels = torch.randn(200_000, 4), torch.randint(0, 3, (200_000,))
    queries = torch.randn(100, 4)  # more than one chunk of 80
    whole = knn_predict(queries, bank, labels, 3, 10, 0.001)
    single = torch.cat([knn_predict(q[None], bank, labels, 3, 10, 0.001) for q in queries])
    assert torch.equal(whole, single)


def test_knn_accuracy_is_in_percent() -> None:
    bank = torch.eye(4)
    assert knn_accuracy(bank, torch.arange(4), bank, torch.arange(4), k=1) == 100
    assert knn_accuracy(bank, torch.tensor([0, 1, 0, 0]), bank, torch.arange(4), k=1) == 50


def test_effective_rank_of_known_spectra() -> None:
    torch.manual_seed(0)
    gaussian = torch.randn(4000, 16)
    assert effective_rank(gaussian) == pytest.approx(16, rel=0.02)
    assert effective_rank(torch.ones(50, 16)) == 1.0
    line = torch.randn(100, 1) * torch.ones(1, 16)  # after normalisation two opposite points
    assert effective_rank(line) == pytest.approx(1.0, abs=1e-6)
    basis = torch.cat([torch.eye(4), -torch.eye(4)])  # four equal singular values
    assert effective_rank(basis) == pytest.approx(4.0, abs=1e-9)
    assert torch.allclose(spectrum(basis), torch.full((4,), 0.25, dtype=torch.float64))


def test_alignment_and_uniformity_by_hand() -> None:
    z = torch.eye(2)
    assert alignment(z, z) == 0
    assert alignment(z, -3 * z) == pytest.approx(4.0)
    assert uniformity(torch.ones(5, 3)) == pytest.approx(0.0, abs=1e-5)
    assert uniformity(torch.tensor([[1.0, 0.0], [-2.0, 0.0]])) == pytest.approx(-8.0, abs=1e-4)  # ‖·‖² = 4, t = 2
