"""Robust rules in front of an aggregator, by name: built for up to f hostile clients among K.

A rule sees the updates of a round, parameters and buffers, may overwrite them, and says which rows are kept.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from fedu2.aggregators.base import column_blocks, gram
from fedu2.defence.base import Arrivals
from fedu2.models.flat import ModelState
from fedu2.options import DefenceOptions
from fedu2.registry import Registry

__all__ = ["Rule", "krum_scores", "multi_krum", "rules", "selected", "trimmed"]

Rule = Callable[[Arrivals, ModelState, int], list[int]]

rules: Registry[Rule] = Registry("rule")


def selected(arrivals: Arrivals, start: ModelState, options: DefenceOptions) -> tuple[Arrivals, dict[int, str]]:
    """What the experiment's rule leaves of the replies, and why others are left out, by client."""
    hostile = math.floor(options.hostile * len(arrivals.replies) + 1e-9)
    kept = rules[options.rule](arrivals, start, hostile)
    why = f"it is among the {len(arrivals.replies) - len(kept)} farthest from the others ({options.rule})"
    return arrivals.only(kept), {r.client: why for row, r in enumerate(arrivals.replies) if row not in kept}


@rules.register("none")
def none(arrivals: Arrivals, start: ModelState, hostile: int) -> list[int]:
    """All as they are."""
    return list(range(len(arrivals.replies)))


@rules.register("multi_krum")
def multi_krum(arrivals: Arrivals, start: ModelState, hostile: int) -> list[int]:
    """Keep the K − f updates with the lowest Krum scores; f at most (K − 3)/2, for which Krum is made.

    Blanchard et al., Machine Learning with Adversaries: Byzantine Tolerant Gradient Descent, NeurIPS 2017. Distances
    are between directions, of parameters and of buffers, so that neither can hide behind the other: how long an update
    may be is what `bounds` decides. By length, the honest client with the most images is farther from the others than a
    reversed update, and one near zero close to everybody.
    """
    K = len(arrivals.replies)
    hostile = min(hostile, (K - 3) // 2)
    if hostile < 1:
        return list(range(K))
    distances = torch.zeros(K, K, dtype=torch.float64)
    for rows, origin in ((arrivals.params, start.params), (arrivals.buffers, start.buffers)):
        distances += _distances(gram(rows, origin))
    scores = krum_scores(distances, hostile)
    return sorted(scores.argsort(stable=True)[: K - hostile].tolist())


def krum_scores(distances: Tensor, hostile: int) -> Tensor:
    """s_k: the sum of client k's K − f − 2 smallest squared distances to others, of (K, K): (K,)."""
    K = len(distances)
    others = distances + torch.diag(torch.full((K,), torch.inf, dtype=distances.dtype))
    return others.sort(1).values[:, : max(1, K - hostile - 2)].sum(1)


def _distances(products: Tensor) -> Tensor:
    """‖Δ_i/‖Δ_i‖ − Δ_j/‖Δ_j‖‖² = 2 − 2 cos(Δ_i, Δ_j) from ⟨Δ_i, Δ_j⟩, (K, K); one of length zero is at √2 of all."""
    norms = products.diagonal().sqrt()
    cosines = products / (norms * norms[:, None]).clamp_min(torch.finfo(products.dtype).tiny)
    return (2 - 2 * cosines).clamp_min(0)


@rules.register("trimmed")
def trimmed(arrivals: Arrivals, start: ModelState, hostile: int) -> list[int]:
    """Coordinate by coordinate, values beyond the (f+1)-th smallest or largest over clients become that one.

    Winsorising rather than dropping, so that an aggregator that weighs clients still sees K updates; with equal
    weights the mean has the trimmed mean's breakdown point. f is at most (K − 1)/2, which leaves the median.
    After Yin et al., Byzantine-Robust Distributed Learning: Towards Optimal Statistical Rates, ICML 2018.
    """
    K = len(arrivals.replies)
    hostile = min(hostile, (K - 1) // 2)
    if hostile > 0:
        for rows in (arrivals.params, arrivals.buffers):
            for block in column_blocks(rows):
                ordered = rows[:, block].sort(0).values
                rows[:, block] = rows[:, block].clamp(ordered[hostile], ordered[K - 1 - hostile])
    return list(range(K))


rules.seal()
