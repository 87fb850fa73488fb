from __future__ import annotations

import pytest
import torch

from fedu2.aggregators import Updates, aggregators, agreement
from fedu2.aggregators.base import gram, weighted_sum
from fedu2.errors import TrainingError, UsageError
from fedu2.experiment import Experiment

fedavg = aggregators["fedavg"](Experiment())


def doubles(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_mean_by_hand() -> None:
    clients = torch.tensor([[1.0, 2.0], [5.0, -2.0]])
    result = fedavg(Updates(torch.zeros(2), clients, doubles(0.75, 0.25)))
    assert result.params.tolist() == [2.0, 1.0]
    assert result.weights.tolist() == result.buffer_weights.tolist() == [0.75, 0.25]
    assert result.metrics == {"weights": [0.75, 0.25]}


@pytest.mark.parametrize("K", [1, 3, 100])
def test_clients_that_agree_are_returned_bit_for_bit(K: int) -> None:
    client = torch.randn(50_000, generator=torch.Generator().manual_seed(K)) * 10 ** torch.linspace(-30, 30, 50_000)
    sizes = torch.rand(K, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) + 1e-3
    result = fedavg(Updates(torch.zeros(50_000), client.repeat(K, 1), sizes / sizes.sum()))
    assert torch.equal(result.params, client)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", ["fedavg", "eua"])
def test_a_client_that_is_not_finite_is_named(name: str, value: float) -> None:
    clients = torch.ones(3, 4)
    clients[1, 2] = value
    with pytest.raises(TrainingError, match="client number 1 "):
        aggregators[name](Experiment())(Updates(torch.zeros(4), clients, doubles(0.5, 0.0, 0.5)))


def test_unknown_aggregator_is_answered_with_the_known_ones() -> None:
    with pytest.raises(UsageError, match="did you mean 'fedavg'"):
        aggregators["fedavgg"]


@pytest.mark.parametrize("columns", [1, 1000, 700_001])
def test_sums_over_blocks_of_columns_are_those_of_the_whole(columns: int) -> None:
    rows = torch.randn(3, columns, generator=torch.Generator().manual_seed(0)) + 10
    exact = rows.double()
    torch.testing.assert_close(gram(rows), exact @ exact.T, rtol=1e-13, atol=0)
    weights = doubles(0.2, 0.3, 0.5)
    assert torch.equal(weighted_sum(weights, rows), (weights @ exact).float())
    assert torch.equal(weighted_sum(weights, rows, rows[0]), (weights @ exact + exact[0]).float())


@pytest.mark.usefixtures("needs_gpu")
def test_sums_keep_double_precision_on_cuda() -> None:
    rows = torch.randn(5, 500_000, generator=torch.Generator().manual_seed(0)) + 10
    torch.testing.assert_close(gram(rows.cuda()), rows.double() @ rows.double().T, rtol=1e-12, atol=0)
    weights = doubles(0.1, 0.2, 0.3, 0.2, 0.2)
    torch.testing.assert_close(weighted_sum(weights, rows.cuda()).cpu(), weighted_sum(weights, rows))


def test_agreement_is_the_mean_cosine_between_updates() -> None:
    generator = torch.Generator().manual_seed(0)
    start, deltas = torch.randn(50, generator=generator), torch.randn(4, 50, generator=generator)
    found = agreement(Updates(start, start + deltas, torch.full((4,), 0.25, dtype=torch.float64)))
    pairs = [torch.cosine_similarity(deltas[i], deltas[j], dim=0) for i in range(4) for j in range(i)]
    assert found == pytest.approx(float(sum(pairs)) / len(pairs), abs=1e-6)


def test_agreement_is_of_what_clients_train() -> None:
    """Their targets may all come from afar, and then move alike."""
    start, shares = torch.zeros(4), torch.full((2,), 0.5, dtype=torch.float64)
    clients = torch.tensor([[1.0, 0.0, 9.0, 9.0], [0.0, 1.0, 9.0, 9.0]])
    assert agreement(Updates(start, clients, shares)) == pytest.approx(162 / 163)
    assert agreement(Updates(start, clients, shares, trained=2)) == pytest.approx(0)


def test_agreement_of_clients_that_stay_where_they_are() -> None:
    start = torch.ones(5)
    shares = torch.full((3,), 1 / 3, dtype=torch.float64)
    assert agreement(Updates(start, start.repeat(3, 1), shares)) is None
    moved = torch.stack([start, start + 1, start + 2])
    assert agreement(Updates(start, moved, shares)) == pytest.approx(1)
