"""The linear probe: a linear classifier on frozen features.

Features are extracted once, without augmentation. The paper's setting (from its authors' code): Adam 3e-3, batches of
512, 200 epochs, shuffled; the accuracy is that of the last epoch on the test set.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fedu2.evaluation.options import LinearOptions
from fedu2.seeds import generator

__all__ = ["Labelled", "linear_probe"]


@dataclass(frozen=True, eq=False)
class Labelled:
    """Features (N, D) float32 and their classes (N,) int64, on one device."""

    features: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.features)


def linear_probe(
    train: Labelled, test: Labelled, classes: int, options: LinearOptions, seeds: Sequence[int]
) -> list[float]:
    """Test accuracy in percent, for each seed. The seeds' classifiers are trained side by side as one batched product.

    Per seed s:  min_{W, b} mean_i CE(W_s h_i + b_s, y_i); seeds differ in initial weights and in the order of images.
    """
    device, width = train.features.device, train.features.shape[1]
    bound = 1 / math.sqrt(width)
    noise = [generator("cpu", seed, "linear probe") for seed in seeds]
    initial = torch.stack([torch.rand(width + 1, classes, generator=draw) for draw in noise])
    weights = ((2 * initial - 1) * bound).to(device).requires_grad_()  # (S, D + 1, C), the bias last
    optimizer = torch.optim.Adam(
        [weights], lr=options.lr, weight_decay=options.weight_decay, fused=train.features.is_cuda
    )
    for _ in range(options.epochs):
        for batch in _batches(len(train), noise, options.batch_size):
            batch = batch.to(device, non_blocking=True)  # (S, B)
            logits = torch.baddbmm(weights[:, -1:], train.features[batch], weights[:, :-1])  # (S, B, C)
            loss = F.cross_entropy(logits.flatten(0, 1), train.labels[batch].flatten(), reduction="sum")
            optimizer.zero_grad()
            (loss / batch.shape[1]).backward()
            optimizer.step()
    with torch.no_grad():
        right = [((torch.addmm(w[-1], test.features, w[:-1])).argmax(1) == test.labels).float().mean() for w in weights]
    return [100 * float(share) for share in right]


def _batches(size: int, noise: Sequence[torch.Generator], batch_size: int) -> Iterator[Tensor]:
    """An epoch's batches for all seeds, (S, B) each; the last one may be smaller."""
    orders = torch.stack([torch.randperm(size, generator=draw) for draw in noise])
    yield from orders.split(batch_size, dim=1)
