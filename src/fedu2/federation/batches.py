"""Which images a client trains on, in which order, and how many steps that makes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from fedu2.experiment import Experiment

__all__ = ["batches_in_epoch", "local_batches", "sizes_of", "steps_of"]


def batches_in_epoch(examples: int, experiment: Experiment) -> int:
    """Batches in one pass over `examples` images. A client smaller than a batch makes one batch of all it has."""
    size = experiment.batch_size
    if examples <= size:
        return 1
    rest = examples % size
    if experiment.last_batch == "fill" or (experiment.last_batch == "keep" and rest > 1):
        return -(-examples // size)
    return examples // size


def sizes_of(examples: int, experiment: Experiment) -> list[int]:
    """The sizes of a client's batches, the usual one first."""
    size, rest = experiment.batch_size, examples % experiment.batch_size
    if examples <= size:
        return [examples]
    return [size, rest] if experiment.last_batch == "keep" and rest > 1 else [size]


def steps_of(examples: Sequence[int], experiment: Experiment, largest: int | None = None) -> list[int]:
    """Optimizer steps that each client makes in a round.

    epochs: E · batches_k.  equal: E_k · batches_k with E_k = min(E · max_j batches_j // batches_k, max_local_epochs):
    small clients make more passes.  A number: that many.  largest: the most images of a client that others keep up
    with, where not every claim is believed; nobody makes fewer than E passes.
    """
    if isinstance(experiment.local_steps, int):
        return [experiment.local_steps] * len(examples)
    batches = [batches_in_epoch(n, experiment) for n in examples]
    epochs = experiment.local_epochs
    if experiment.local_steps == "epochs":
        return [epochs * count for count in batches]
    longest = batches_in_epoch(max(examples) if largest is None else largest, experiment)
    most = max(epochs, experiment.max_local_epochs)
    return [max(epochs, min(epochs * longest // count, most)) * count for count in batches]


def local_batches(share: Tensor, steps: int, experiment: Experiment, generator: torch.Generator) -> Iterator[Tensor]:
    """`steps` batches of image indices of one client; a fresh permutation of its share in every epoch.

    A batch of a single image is never made of a larger share: batch norm needs company.
    """
    count = batches_in_epoch(len(share), experiment)
    done = 0
    while done < steps:
        order = share[torch.randperm(len(share), generator=generator)]
        if experiment.last_batch == "fill" and len(share) > experiment.batch_size:
            order = torch.cat([order, order[: experiment.batch_size]])
        for start in range(0, count * experiment.batch_size, experiment.batch_size)[: steps - done]:
            yield order[start : start + experiment.batch_size]
            done += 1
