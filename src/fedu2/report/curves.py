"""The curves of the page: which numbers of metrics.jsonl are drawn over the rounds, under which words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fedu2.report.content import Sheet

__all__ = ["Curve", "curves_of"]


@dataclass(frozen=True)
class Curve:
    """A number over the rounds."""

    key: str
    title: str
    hint: str = ""
    unit: str = ""
    main: bool = True  # else under "More curves"


KNOWN = (
    Curve("knn", "kNN accuracy", "of the global encoder on test images; higher is better", "%"),
    Curve("loss", "Training loss", "mean over the clients of a round"),
    Curve("align", "Alignment term", "ℓₐ, the objective's own part of the loss"),
    Curve("fur.loss", "FUR term", "ℓᵤ, how far representations are from uniform"),
    Curve("effective_rank", "Effective rank", "of the features; a falling rank is a sign of collapse"),
    Curve("fur.mass", "Matched FUR mass", "share of the mass that transport moves; 0: FUR does nothing"),
    Curve("agreement", "Agreement", "mean cosine between the clients' updates; 1: all move alike"),
    Curve("samples_per_second", "Speed", "samples per second"),
    Curve("projector_rank", "Effective rank of projections", main=False),
    Curve("alignment", "Alignment", "distance between two views of an image; lower is better", main=False),
    Curve("uniformity", "Uniformity", "lower: more evenly spread over the sphere", main=False),
    Curve("fur.gap", "FUR gap", "relative duality gap of the transport", main=False),
    Curve("lr", "Learning rate", main=False),
    Curve("seconds", "Seconds a round", main=False),
    Curve("bytes_up", "Bytes from the clients", main=False),
    Curve("bytes_down", "Bytes to the clients", main=False),
)


def curves_of(sheets: Sequence[Sheet]) -> list[Curve]:
    """The curves of which some run has a point: the known ones, then whatever else was written down."""
    written = {name for sheet in sheets for name in sheet.series if sheet.values(name)}
    known = [curve for curve in KNOWN if curve.key in written]
    return known + [Curve(key, key, main=False) for key in sorted(written - {curve.key for curve in KNOWN})]
