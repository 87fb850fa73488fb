"""Robust rules in front of an aggregator, by name: built for up to f hostile clients among K.

A rule sees the updates of a round, parameters and buffers, may overwrite them, and says which rows are kept.
"""

from __future__ import annotations

import logging
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

# Who is left out by multi-Krum is at least this much farther from the others than the client in the middle. On the
# sample honest clients are up to 1.2 times as far, reversed updates 1.3 times and more, noise 1.1 times and more.
CLEARLY = 1.1
# A rule withstands at most (K − this)/2 hostile clients among K.
COMPANY = {"none": 0, "multi_krum": 3, "trimmed": 1}

log = logging.getLogger("fedu2")


def selected(arrivals: Arrivals, start: ModelState, options: DefenceOptions) -> tuple[Arrivals, dict[int, str]]:
    """What the experiment's rule leaves of the replies, and why others are left out, by client."""
    K = len(arrivals.replies)
    hostile = min(math.floor(options.hostile * K + 1e-9), (K - COMPANY[options.rule]) // 2)
    if hostile < 1:
        if options.rule != "none":
            log.warning("defence.rule=%s does nothing: %d clients are too few for it", options.rule, K)
        return arrivals, {}
    kept = rules[options.rule](arrivals, start, hostile)
    why = f"it is far from the others ({options.rule})"
    return arrivals.only(kept), {r.client: why for row, r in enumerate(arrivals.replies) if row not in kept}


@rules.register("none")
def none(arrivals: Arrivals, start: ModelState, hostile: int) -> list[int]:
    """All as they are."""
    return list(range(len(arrivals.replies)))


@rules.register("multi_krum")
def multi_krum(arrivals: Arrivals, start: ModelState, hostile: int) -> list[int]:
    """Leave out the at most f updates with the highest Krum scores that stand out; K ≥ 2f + 3, for which Krum is made.

    After Blanchard et al., Machine Learning with Adversaries: Byzantine Tolerant Gradient Descent, NeurIPS 2017. Here
    distances are between directions, of parameters and of buffers, so that neither can hide behind the other: how long
    an update may be is what `bounds` decides. By length, the honest client with the most images is farther from the
    others than a reversed update, and one near zero close to everybody. The original always leaves out f, which costs
    clients of differing data more than it saves when nobody attacks.
    """
    K = len(arrivals.replies)
    distances = torch.zeros(K, K, dtype=torch.float64)
    for rows, origin in ((arrivals.params, start.params), (arrivals.buffers, start.buffers)):
        distances += _distances(gram(rows, origin))
    scores = krum_scores(distances, hostile)
    farthest = scores.argsort(descending=True, stable=True)[:hostile]
    out = farthest[scores[farthest] > CLEARLY * scores.median()].tolist()
    return [row for row in range(K) if row not in out]


def krum_scores(distances: Tensor, hostile: int) -> Tensor:
    """s_k: the sum of client k's K − f − 2 smallest squared distances to others, of (K, K), but for f − 1: (K,).

    The f − 1 smallest do not count, for they may be to one's accomplices: f clients that send the same are close to one
    another and, counted in full, nearer to others than honest clients whose data differ. With f = 1 this is Krum.
    """
    K = len(distances)
    others = distances + torch.diag(torch.full((K,), torch.inf, dtype=distances.dtype))
    return others.sort(1).values[:, hostile - 1 : K - hostile - 2].sum(1)


def _distances(products: Tensor) -> Tensor:
    """‖Δ_i/‖Δ_i‖ − Δ_j/‖Δ_j‖‖² = 2 − 2 cos(Δ_i, Δ_j) from ⟨Δ_i, Δ_j⟩, (K, K); one of length zero is at √2 of all."""
    norms = products.diagonal().sqrt()
    cosines = products / (norms * norms[:, None]).clamp_min(torch.finfo(products.dtype).tiny)
    return (2 - 2 * cosines).clamp_min(0)


@rules.register("trimmed")
def trimmed(arrivals: Arrivals, start: ModelState, hostile: int) -> list[int]:
    """Coordinate by coordinate, values beyond the (f+1)-th smallest or largest over clients become that one.

    Winsorising rather than dropping, so that an aggregator that weighs clients still sees K updates; with equal
    weights the mean has the trimmed mean's breakdown point. K ≥ 2f + 1, where the median is left.
    After Yin et al., Byzantine-Robust Distributed Learning: Towards Optimal Statistical Rates, ICML 2018.
    """
    K = len(arrivals.replies)
    for rows in (arrivals.params, arrivals.buffers):
        for block in column_blocks(rows):
            ordered = rows[:, block].sort(0).values
            rows[:, block] = rows[:, block].clamp(ordered[hostile], ordered[K - 1 - hostile])
    return list(range(K))


rules.seal()
