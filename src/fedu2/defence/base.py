"""What arrived in a round, before anybody trusts it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from fedu2.aggregators.base import column_blocks
from fedu2.methods import Reply

__all__ = ["Arrivals", "lengths"]


@dataclass(frozen=True, eq=False)
class Arrivals:
    """The replies of a round; their models are the rows of two matrices, which the defences may overwrite."""

    replies: Sequence[Reply]
    params: Tensor  # (K, P)
    buffers: Tensor  # (K, Q)

    def only(self, rows: Sequence[int]) -> Arrivals:
        """These rows; nothing is copied where they are all."""
        if len(rows) == len(self.params):
            return self
        rows = list(rows)
        return Arrivals([self.replies[row] for row in rows], self.params[rows], self.buffers[rows])


def lengths(rows: Tensor, origin: Tensor) -> Tensor:
    """‖row_k − origin‖ of a matrix (K, P): (K,), float64, on the CPU."""
    squares = rows.new_zeros(len(rows)).double()
    for block in column_blocks(rows):
        squares += (rows[:, block].double() - origin[block]).square().sum(1)
    return squares.sqrt().cpu()
