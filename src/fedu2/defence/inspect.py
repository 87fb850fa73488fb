"""What a reply must be to take part in a round. None of this asks whether an update is a *good* one.

Of each reply alone, before its model joins the others: types and shapes, numbers that can be logged, what the method
says of its payload. Of all together: models that are not finite, variances below zero, updates of length zero or of a
hundred times the median length, and models that were seen before, bit for bit: of another client in this round, or of
any in the last rounds.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from fedu2.aggregators.base import column_blocks
from fedu2.defence.base import Arrivals, lengths
from fedu2.methods import Method, Reply
from fedu2.models.flat import Layout, ModelState

__all__ = ["REMEMBERED", "fingerprints", "inspected", "misfit"]

REMEMBERED = 32  # models of a client that a replay is known by

_TERM = re.compile(r"[A-Za-z][\w.]{0,63}", re.ASCII)  # what a term of a loss can be called
_TERMS = 64  # no loss has more
_HUGE = 1e30  # no loss comes near it, and sums of such stay finite
_MOST_IMAGES = 1 << 40
_OUTSIZED = 100.0  # times the median length; honest clients of very unequal size came to 14
# What the server itself writes down of a round.
_OWN = {
    "round", "lr", "clients", "samples", "bytes_down", "bytes_up", "agreement", "client_loss", "left_out", "bounded",
    "seconds", "samples_per_second", "evaluation_seconds", "knn", "effective_rank", "projector_rank", "alignment",
    "uniformity", "spread", "projector_spread", "collapse",
}  # fmt: skip


def misfit(reply: Reply, start: ModelState, method: Method) -> str | None:
    """Why a reply is none, as seen from itself alone; None where it is one."""
    for name in ("params", "buffers"):
        found, expected = getattr(reply.model, name), getattr(start, name)
        if (found.shape, found.dtype) != (expected.shape, expected.dtype):
            return f"its {name} are {found.dtype} {tuple(found.shape)}"
    if not 1 <= reply.examples < _MOST_IMAGES or not 0 <= reply.samples < _MOST_IMAGES:
        return "the number of its images cannot be"
    if "loss" not in reply.metrics or len(reply.metrics) > _TERMS:
        return "it does not tell its loss"
    if not all(_TERM.fullmatch(name) and name not in _OWN for name in reply.metrics):
        return "it calls a term of its loss what none is called"
    if not all(math.isfinite(value) and abs(value) < _HUGE for value in reply.metrics.values()):
        return "its loss is not finite, or huge"
    if not all(bool(t.isfinite().all()) for t in reply.payload.values()):
        return "its payload is not finite"
    return method.doubts(reply.payload)


def inspected(
    arrivals: Arrivals, start: ModelState, buffer_layout: Layout, seen: Mapping[int, Sequence[str]]
) -> tuple[Arrivals, dict[int, str], dict[int, tuple[str, ...]]]:
    """The replies that may take part; why others may not, by client; and the models seen, with those of this round.

    seen: fingerprints of the last models of each client.
    """
    if not arrivals.replies:
        return arrivals, {}, {client: tuple(known) for client, known in seen.items()}
    prints = fingerprints(arrivals.params)
    broken = _broken(arrivals, start, buffer_layout)
    before = {known: client for client, models in seen.items() for known in models}
    refused: dict[int, str] = {}
    after = {client: tuple(known) for client, known in seen.items()}
    now: dict[str, int] = {}
    for row, reply in enumerate(arrivals.replies):
        client, model = reply.client, prints[row]
        if row in broken:
            refused[client] = broken[row]
        elif model in before:
            refused[client] = f"its model is one that client {before[model]} has sent before"
        elif model in now:
            refused[client] = f"its model is that of client {now[model]}"
        else:
            now[model] = client
            after[client] = (*after.get(client, ()), model)[-REMEMBERED:]
    kept = [row for row, reply in enumerate(arrivals.replies) if reply.client not in refused]
    return arrivals.only(kept), refused, after


def _broken(arrivals: Arrivals, start: ModelState, buffer_layout: Layout) -> dict[int, str]:
    """Rows whose numbers cannot be those of a model that was trained."""
    params, buffers = arrivals.params, arrivals.buffers
    moved = lengths(params, start.params)
    still, outsized = moved == 0, moved > _OUTSIZED * moved.nanmedian()
    finite = {"params": _finite(params), "buffers": _finite(buffers)}
    below = torch.zeros(len(params), dtype=torch.bool, device=params.device)
    for entry in buffer_layout.entries:
        if entry.name.endswith("running_var"):
            below |= (buffers[:, entry.start : entry.stop] < 0).any(1)
    negative = below.tolist()
    broken: dict[int, str] = {}
    for row in range(len(params)):
        for name, sound in finite.items():
            if not sound[row]:
                broken.setdefault(row, f"its {name} are not finite")
        if still[row]:
            broken.setdefault(row, "its update is zero")
        if outsized[row] and len(params) > 2:  # of two, none can tell who is outsized
            broken.setdefault(row, f"its update is more than {_OUTSIZED:g} times as long as the median")
        if negative[row]:
            broken.setdefault(row, "its variances are negative")
    return broken


def _finite(rows: Tensor) -> list[bool]:
    """Whether all values of a row are: the extremes carry every NaN and infinity, and need no temporary."""
    if not rows.shape[1]:
        return [True] * len(rows)
    return torch.stack(tuple(rows.aminmax(dim=1))).isfinite().all(0).tolist()


def fingerprints(rows: Tensor) -> list[str]:
    """Of every row of (K, P) float32: Σ b_i and Σ i·b_i modulo 2⁶⁴, with b_i the bits of its i-th number.

    Whole numbers: the same on every device, in whatever order they are added.
    """
    bits = rows.view(torch.int32)
    sums = torch.zeros(len(rows), 2, dtype=torch.int64, device=rows.device)
    for block in column_blocks(rows):
        columns = bits[:, block].long()
        places = torch.arange(block.start, block.start + columns.shape[1], device=rows.device)
        sums[:, 0] += columns.sum(1)
        sums[:, 1] += (columns * places).sum(1)
    return ["".join(f"{number % (1 << 64):016x}" for number in pair) for pair in sums.tolist()]
