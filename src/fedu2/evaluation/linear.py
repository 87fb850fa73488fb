"""The linear probe: a linear classifier on frozen features.

Features are extracted once, without augmentation. The paper's setting (from its authors' code): Adam 3e-3, batches of
512, 200 epochs, shuffled; the accuracy is that of the last epoch on the test set.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fedu2.evaluation.options import LinearOptions
from fedu2.federation.capture import CapturedSteps
from fedu2.federation.optimizers import restart
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
    train: Labelled, test: Labelled, classes: int, options: LinearOptions, seeds: Sequence[int], *, graph: bool = True
) -> list[float]:
    """Test accuracy in percent, for each seed. The seeds' classifiers are trained side by side as one batched product.

    Per seed s:  min_{W, b} mean_i CE(W_s h_i + b_s, y_i); seeds differ in initial weights and in the order of images.
    graph: on a GPU an epoch is captured and replayed.
    """
    probe = _Probe(train, classes, options, seeds)
    probe.train(options.epochs, graph)
    return probe.accuracies(test)


class _Probe:
    """The classifiers of all seeds. weights: (S, D + 1, C), the bias last; order: (S, N), an epoch's images by seed."""

    def __init__(self, train: Labelled, classes: int, options: LinearOptions, seeds: Sequence[int]) -> None:
        device, width = train.features.device, train.features.shape[1]
        self.data, self.options = train, options
        self.noise = [generator("cpu", seed, "linear probe") for seed in seeds]
        initial = torch.stack([torch.rand(width + 1, classes, generator=draw) for draw in self.noise])
        self.weights = ((2 * initial - 1) / math.sqrt(width)).to(device).requires_grad_()
        self.order = torch.zeros(len(seeds), len(train), dtype=torch.int64, device=device)
        gpu = train.features.is_cuda
        self.optimizer = torch.optim.Adam(
            [self.weights], lr=options.lr, weight_decay=options.weight_decay, fused=gpu, capturable=gpu
        )

    def train(self, epochs: int, graph: bool) -> None:
        device = self.weights.device
        captured = self._captured() if graph and device.type == "cuda" else None
        for _ in range(epochs):
            self.order.copy_(torch.stack([torch.randperm(len(self.data), generator=draw) for draw in self.noise]))
            captured(0, 0.0) if captured else self._epoch()

    def accuracies(self, test: Labelled) -> list[float]:
        """In percent, for each seed."""
        with torch.no_grad():
            guesses = [torch.addmm(w[-1], test.features, w[:-1]).argmax(1) for w in self.weights]
        return [100 * float((guess == test.labels).float().mean()) for guess in guesses]

    def _epoch(self) -> None:
        """One pass over the images as `order` has them; this is what a graph captures."""
        for batch in self.order.split(self.options.batch_size, dim=1):  # (S, B); the last one may be smaller
            logits = torch.baddbmm(self.weights[:, -1:], self.data.features[batch], self.weights[:, :-1])  # (S, B, C)
            loss = F.cross_entropy(logits.flatten(0, 1), self.data.labels[batch].flatten(), reduction="sum")
            self.optimizer.zero_grad()
            (loss / batch.shape[1]).backward()
            self.optimizer.step()

    def _captured(self) -> CapturedSteps:
        """The epoch as a graph; the rehearsals leave no trace."""
        initial, device = self.weights.detach().clone(), self.weights.device
        stream = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        captured = CapturedSteps(lambda _: self._epoch(), stream, torch.Generator(device))
        captured.capture(0, 0.0)
        torch.cuda.current_stream(device).wait_stream(stream)
        self.weights.data.copy_(initial)
        restart(self.optimizer, self.options.lr)
        return captured
