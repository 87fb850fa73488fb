"""When a run looks collapsed: figures of a round that are lower than where training went well.

Runs on CIFAR-10 and on the sample in which nothing was amiss had ranks of 3.5 % of the dimension or more, and matched
masses of 0.4 or more. Adam at a rate that ruined the projector left it a rank of 1.6 % (decision 4); plain BYOL, with
small batches or long steps of the server, went on learning with 1.4 %, but less than without them. The spread is
there because a rank does not show a complete collapse: it is of what is left beside the mean, which then is rounding,
and has a high rank.

How low a spread may be is the method's to say (`Method.least_spread`): in short runs on the sample that learned, with
encoders of width 2 to 8, FedX went through 0.0004 in its first round, and others had 0.37 and more; Orchestra went
through 0.003 in a first round on CIFAR-10. Few images, few dimensions and small encoders lower all figures before
anything is learned: the rank is at most min(N − 1, D), and untrained projectors of width 2 had spreads down to 0.003.
So no floor is above a third of what the run's untrained model had.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeGuard

__all__ = ["Sign", "attainable", "collapsed", "first_signs", "floors", "sentence"]

RANK, LEAST_RANK = 0.02, 2.0  # of the dimension, and at least
MASS = 0.05
OF_UNTRAINED = 1 / 3
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


def floors(features: int, projections: int, spread: float) -> dict[str, float]:
    """What the figures of a trained model must not fall below, with features and projections of these dimensions."""
    ranks = {"effective_rank": features, "projector_rank": projections}
    return {
        **{name: max(LEAST_RANK, RANK * dimension) for name, dimension in ranks.items()},
        "projector_spread": spread,
        "fur.mass": MASS,
    }


def attainable(least: Mapping[str, float], records: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The floors, none above a third of what the untrained model had, if that is among the records."""
    untrained = next((record for record in records if record["round"] == 0), {})
    had = {name: value for name in least if _is_number(value := untrained.get(name))}
    return {name: min(floor, OF_UNTRAINED * had.get(name, math.inf)) for name, floor in least.items()}


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
            if _is_number(value):
                first = signs.get(name, Sign(record["round"], value, 0))
                signs[name] = first._replace(rounds=first.rounds + 1)
    return signs


def _is_number(value: Any) -> TypeGuard[float]:
    """Records can be damaged."""
    return isinstance(value, float) and math.isfinite(value)
