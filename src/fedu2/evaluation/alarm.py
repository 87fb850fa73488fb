"""When a run looks collapsed: figures of a round that are lower than those of any training that learned something.

Runs on CIFAR-10 and on the sample that learned had ranks of 4.8 % of the dimension or more, matched masses of 0.4 or
more; Adam at a rate that ruined the projector left it a rank of 1.6 % (decision 4). The spread is there because a rank
does not show a complete collapse: it is of what is left beside the mean, which then is rounding, and has a high rank.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

__all__ = ["Sign", "collapsed", "first_signs", "floors", "sentence"]

RANK, LEAST_RANK = 0.02, 2.0  # of the dimension, and at least
SPREAD = 0.02  # on the sample: untrained 0.03 and 0.08, in runs that learn 0.5 and more, without a stop-gradient 0.008
MASS = 0.05
TITLES = {
    "effective_rank": "the effective rank of the features",
    "projector_rank": "the effective rank of the projections",
    "projector_spread": "the spread of the projections",
    "fur.mass": "FUR's matched mass",
}


class Sign(NamedTuple):
    """A figure was too low for the first time."""

    round: int
    value: float
    rounds: int  # in how many it was, so far


def floors(features: int, projections: int) -> dict[str, float]:
    """What the figures of a trained model must not fall below, with features and projections of these dimensions."""
    ranks = {"effective_rank": features, "projector_rank": projections}
    return {
        **{name: max(LEAST_RANK, RANK * dimension) for name, dimension in ranks.items()},
        "projector_spread": SPREAD,
        "fur.mass": MASS,
    }


def collapsed(record: Mapping[str, Any], least: Mapping[str, float]) -> dict[str, float]:
    """The figures of a round that are below their floors; of an untrained model none is."""
    return {name: record[name] for name in least if record["round"] > 0 and record.get(name, least[name]) < least[name]}


def sentence(name: str, sign: Sign, floor: float | None = None) -> str:
    """What happened, and since when."""
    below = "" if floor is None else f", below {floor:.3g}"
    what = "it does nothing" if name == "fur.mass" else "the representation collapses"
    return f"{TITLES.get(name, name)} is {sign.value:.3g}{below}, in round {sign.round}: {what}"


def first_signs(records: Sequence[Mapping[str, Any]]) -> dict[str, Sign]:
    """Of each figure that was too low in some round, in which first."""
    signs: dict[str, Sign] = {}
    for record in records:
        low = record.get("collapse")
        for name, value in low.items() if isinstance(low, Mapping) else ():
            if isinstance(value, float) and math.isfinite(value):
                first = signs.get(name, Sign(record["round"], value, 0))
                signs[name] = first._replace(rounds=first.rounds + 1)
    return signs
