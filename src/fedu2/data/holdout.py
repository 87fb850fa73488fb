"""Which images are kept back to judge by."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from fedu2.seeds import derive

__all__ = ["held_out"]


def held_out(owners: Tensor, labels: Tensor | None, share: float) -> Tensor:
    """Which images are kept for evaluation, bool (N,): `share` of every client and class, up to one image.

    Images are put in order of client and class, at random within; counting along that order, one is taken whenever
    share · position passes a half. Independent of the experiment's seed, so that all runs are judged on the same
    images. A client keeps at least one image for training.
    """
    n = len(owners)
    shuffled = np.random.default_rng(derive(0, "holdout")).permutation(n)
    keys = owners.numpy() if labels is None else np.stack([labels.numpy(), owners.numpy()])
    order = shuffled[np.lexsort(np.atleast_2d(keys)[:, shuffled])]
    passed = np.floor(np.arange(n + 1) * share + 0.5)
    chosen = np.zeros(n, bool)
    chosen[order] = np.diff(passed) > 0
    for client in np.unique(owners.numpy()):
        own = np.flatnonzero(owners.numpy() == client)
        if chosen[own].all():
            chosen[own[0]] = False
    return torch.from_numpy(chosen)
