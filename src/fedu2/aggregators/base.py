"""What an aggregator is: a function from the clients' parameters to new global parameters.

The clients' models arrive as the rows of one matrix (K, P), P in the millions. It is the largest thing on the
server, so an aggregator may overwrite it, and the helpers here pass over it in blocks of columns: sums are taken in
float64 (on CUDA, too, where TF32 would lose digits), yet never more than one block is held in float64.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fedu2.errors import TrainingError
from fedu2.experiment import Experiment
from fedu2.models.flat import Layout
from fedu2.registry import Registry

__all__ = [
    "Aggregate",
    "Aggregator",
    "Buffers",
    "Updates",
    "aggregators",
    "agreement",
    "column_blocks",
    "gram",
    "inner_products",
    "require_finite",
    "weighted_sum",
]

# Numbers held in float64 at a time: 8 MiB, and 128 MiB on a GPU, where smaller blocks cost more to launch than to sum.
_BLOCK = {"cpu": 1 << 20, "cuda": 1 << 24}


@dataclass(frozen=True, eq=False)
class Updates:
    """What an aggregator sees."""

    start: Tensor  # (P,) θ_g, the global parameters that were sent out
    clients: Tensor  # (K, P) θ_k, the clients' parameters; the aggregator may overwrite them
    shares: Tensor  # (K,) float64 on the CPU: the clients' shares of the data, Σ = 1
    buffers: Buffers | None = None  # batch-norm buffers; most aggregators leave them to `Aggregate.buffer_weights`
    layout: Layout = field(default_factory=lambda: Layout(()))  # where each named tensor lies in a row of `clients`
    round: int = 1
    trained: int | None = None  # leading parameters that are trained; the others are a target network's. None: all


@dataclass(frozen=True, eq=False)
class Buffers:
    """The buffers that travelled beside the parameters."""

    start: Tensor  # (Q,) as they were sent out
    clients: Tensor  # (K, Q)
    layout: Layout


@dataclass(frozen=True, eq=False)
class Aggregate:
    """What an aggregator returns: θ_g + Σ_k weights_k (θ_k − θ_g), and how it came about."""

    params: Tensor  # (P,) the new global parameters
    weights: Tensor  # (K,) float64 on the CPU: coefficients of the clients' updates; Σ = 1 if convex
    buffer_weights: Tensor  # (K,) float64 on the CPU, Σ = 1: for averaging batch-norm buffers
    metrics: dict[str, Any]  # plain numbers and lists, for the log
    buffers: Tensor | None = None  # (Q,) the new buffers, where they are not the mean by `buffer_weights`


Aggregator = Callable[[Updates], Aggregate]

aggregators: Registry[Callable[[Experiment], Aggregator]] = Registry("aggregator")


def gram(rows: Tensor, origin: Tensor | None = None) -> Tensor:
    """All inner products ⟨row_i, row_j⟩ of a matrix (K, P), as seen from `origin` (P,): (K, K), float64, on the CPU."""
    products = torch.zeros(len(rows), len(rows), dtype=torch.float64, device=rows.device)
    for block in column_blocks(rows):
        columns = rows[:, block].double()
        if origin is not None:
            columns -= origin[block]
        products.addmm_(columns, columns.T)
    return ((products + products.T) / 2).cpu()


def agreement(updates: Updates) -> float | None:
    """How unified the clients are: the mean cosine between the updates Δ_i, Δ_j of two clients, i ≠ j.

    1: all move alike; 0: each its own way. None where fewer than two clients moved. Of what they train, for a target
    network that travels shows where it was sent from, too, and that is the same for all.
    """
    products = gram(updates.clients[:, : updates.trained], updates.start[: updates.trained])
    norms = products.diagonal().sqrt()
    moved = norms > 0
    count = int(moved.sum())
    if count < 2:
        return None
    cosines = products[moved][:, moved] / norms[moved] / norms[moved, None]
    return float((cosines.sum() - count) / (count * (count - 1)))


def inner_products(rows: Tensor, vector: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """⟨row_k, v⟩ (K,), ‖row_k‖² (K,) and ‖v‖² () of a matrix (K, P) and a vector (P,): float64, on the CPU."""
    products, squares = torch.zeros(2, len(rows), dtype=torch.float64, device=rows.device)
    square = torch.zeros((), dtype=torch.float64, device=rows.device)
    for block in column_blocks(rows):
        columns, part = rows[:, block].double(), vector[block].double()
        products += columns @ part
        squares += columns.square().sum(1)
        square += part @ part
    return products.cpu(), squares.cpu(), square.cpu()


def weighted_sum(weights: Tensor, rows: Tensor, offset: Tensor | None = None) -> Tensor:
    """Σ_k weights_k row_k (+ offset) of a matrix (K, P): (P,), in the type of the rows, rounded only once."""
    factors = weights.to(rows.device, torch.float64)
    result = rows.new_empty(rows.shape[1])
    for block in column_blocks(rows):
        total = factors @ rows[:, block].double()
        result[block] = total if offset is None else total + offset[block]
    return result


def require_finite(clients: Tensor) -> None:
    """Name the first client whose row of (K, P) has a value that is not finite."""
    for position, row in enumerate(clients):
        # The extremes carry every NaN and infinity, and need no temporary of the size of the model.
        if not bool(torch.stack(torch.aminmax(row)).isfinite().all()):
            raise TrainingError(
                f"the update of client number {position} (counted from 0) is not finite: lower optimizer.lr"
                " or leave this client out"
            )


def column_blocks(matrix: Tensor) -> Iterator[slice]:
    """Slices that cover the columns of a matrix (K, P), each small enough to be held in float64."""
    rows, columns = matrix.shape
    width = max(1, _BLOCK.get(matrix.device.type, _BLOCK["cpu"]) // max(1, rows))
    return (slice(begin, begin + width) for begin in range(0, columns, width))
