"""How much the server listens to each client: EUA's weights and change rates, clients × rounds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from fedu2.report.drawing import Drawing
from fedu2.report.figures.base import figures
from fedu2.report.style import WIDTH, heat_map, highest, new_figure, titled, whole_numbers
from fedu2.report.subject import Subject
from fedu2.run import Run

__all__ = ["eua", "over_rounds"]


@figures.register("eua")
def eua(subjects: Sequence[Subject]) -> Drawing | None:
    """EUA's weights and change rates; a row a run."""
    holders = [subject for subject in subjects if np.isfinite(over_rounds(subject.run, "eua.weights")).any()]
    if not holders:
        return None
    heights = [min(max(0.17 * subject.run.experiment.clients, 1.1), 3.4) for subject in holders]
    figure = new_figure(sum(heights) + 0.75 * len(heights))
    rows = figure.subplots(len(holders), 2, squeeze=False, height_ratios=heights, sharey="row")
    for subject, height, (left, right) in zip(holders, heights, rows, strict=True):
        weights, rates = over_rounds(subject.run, "eua.weights"), over_rounds(subject.run, "eua.rates")
        cell = ((WIDTH / 2 - 1.2) / weights.shape[1], height / len(weights))
        least = min(0.0, float(np.nanmin(rates, initial=0.0)))  # where a client's deviation grows
        for axes, values, limits in ((left, weights, (0, highest(weights))), (right, rates, (least, highest(rates)))):
            image = heat_map(axes, values, limits=limits, cell=cell, first=1)
            figure.colorbar(image, ax=axes, pad=0.02, aspect=12 * height).outline.set_visible(False)
            axes.set_xlabel("round")
            whole_numbers(axes, values.shape)
        left.set_ylabel("client")
        titled(left, "weight" if len(holders) == 1 else f"weight: {subject.label}", WIDTH / 2 - 0.4)
        right.set_title("change rate")
    caption = (
        "How much of each client's update enters the global model, and the rate at which the step reduces the client's"
        " deviation; below 0 it grows. Without the guard, clients that have weight share the round's smallest rate. In"
        " empty cells a client did not take part."
    )
    return Drawing("eua", "EUA: weights and change rates", caption, figure)


def over_rounds(run: Run, name: str) -> np.ndarray[Any, Any]:
    """A list of numbers a round, one for each of its clients: (K, rounds), NaN for clients that did not take part."""
    last = max((record["round"] for record in run.history), default=0)
    matrix = np.full((run.experiment.clients, last), np.nan)
    for record in run.history:
        clients, values = record.get("clients"), record.get(name)
        if record["round"] and _pairs(clients, values, len(matrix)):
            matrix[clients, record["round"] - 1] = values
    return matrix


def _pairs(clients: Any, values: Any, most: int) -> bool:
    """Whether these are numbers of clients and a value for each; a damaged line may hold anything."""
    lists = isinstance(clients, list) and isinstance(values, list) and len(clients) == len(values)
    known = lists and all(isinstance(client, int) and 0 <= client < most for client in clients)
    return bool(known and all(isinstance(value, int | float) for value in values))
