"""How much one client can weigh: by the length of its update, and by the images that it claims to have.

Both are bounded by a multiple of the median over the round's clients (of two in the middle the smaller), which those
that are hostile cannot move far as long as they are fewer than half.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import median_low
from typing import Literal

from torch import Tensor

from fedu2.aggregators.base import column_blocks
from fedu2.defence.base import Arrivals, lengths
from fedu2.models.flat import ModelState
from fedu2.options import DefenceOptions

__all__ = ["bounded", "claims", "claims_limit", "shortened"]

# What `auto` is for clients that are not ours. Honest updates of clients of very unequal size have up to 14 times the
# median length. Images are another matter: a claim costs nothing, cannot be checked, and buys weight.
AUTO_CLIP, AUTO_CLAIMS = 20.0, 3.0


def bounded(
    arrivals: Arrivals, start: ModelState, options: DefenceOptions, trusted: bool
) -> tuple[Arrivals, dict[int, list[str]]]:
    """The replies within their bounds, with the matrices overwritten; and what was bounded, by client."""
    told: dict[int, list[str]] = {}
    replies = list(arrivals.replies)

    def tell(row: int, what: str) -> None:
        told.setdefault(replies[row].client, []).append(what)

    if clip := limit_of(options.clip, trusted, AUTO_CLIP):
        for row in shortened(arrivals.params, start.params, clip):
            tell(row, f"its update is more than {clip:g} times as long as the median")
        for row in shortened(arrivals.buffers, start.buffers, clip):
            tell(row, f"the update of its buffers is more than {clip:g} times as long as the median")
    if most := claims_limit(options, trusted):
        for row, images in claims([reply.examples for reply in replies], most).items():
            tell(row, f"it claims more than {most:g} times as many images as the median")
            replies[row] = replace(replies[row], examples=images)
    return Arrivals(replies, arrivals.params, arrivals.buffers), told


def claims_limit(options: DefenceOptions, trusted: bool) -> float | None:
    """The multiple of the median number of images that a client may claim; None: no bound."""
    return limit_of(options.claims, trusted, AUTO_CLAIMS)


def limit_of(option: float | Literal["auto"] | None, trusted: bool, auto: float) -> float | None:
    """The multiple of the median that an option means; None: no bound."""
    return (None if trusted else auto) if option == "auto" else option


def shortened(rows: Tensor, origin: Tensor, limit: float) -> list[int]:
    """Shorten, in place, the updates row_k − origin longer than `limit` times the median length; which they were.

    Running variances stay positive: what is left is a mean of two positive numbers. All others keep their bits.
    """
    if not rows.numel():
        return []
    found = lengths(rows, origin)
    most = limit * float(found.median())
    over = [row for row, length in enumerate(found.tolist()) if length > most > 0]
    for row in over:
        factor = most / float(found[row])
        one = rows[row : row + 1]
        for block in column_blocks(one):
            away = one[:, block].double() - origin[block]
            one[:, block] = away.mul_(factor).add_(origin[block]).to(rows)
    return over


def claims(examples: Sequence[int], limit: float) -> dict[int, int]:
    """The places that claim more than `limit` times the median, with what they count instead."""
    most = max(1, int(limit * median_low(examples))) if examples else 0
    return {place: most for place, images in enumerate(examples) if images > most}
