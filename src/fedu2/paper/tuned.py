"""What rows were tuned to: a section of the page of results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fedu2.paper.plan import HOME, cell, exhibits, tries
from fedu2.paper.rows import MARGIN, ROW_TRY_SETTINGS, ROWS, TRIES, TRY_SETTINGS
from fedu2.paper.tables import Findings, Sheet, assignments, markdown, measured, shown_score

__all__ = ["tuning_section"]


def tuning_section(found: Findings) -> str:
    """Every row whose tries all have records, the try that its tables have in bold; and the names of the others."""
    played = {row: scores for row in TRIES if all(scores := _scores(row, found))}
    waiting = [ROWS[row].title for row in TRIES if row not in played]
    parts = [f"## {exhibits['tuning'].title}\n"]
    if played:
        special = "".join(f", and {assignments(own)} with {ROWS[row].title}" for row, own in ROW_TRY_SETTINGS.items())
        table = Sheet("", ["method", "default", "second try", "third try"], [_line(row, played[row]) for row in played])
        parts += [
            f"kNN after tries with {assignments(TRY_SETTINGS)}{special}, judged by the training images that were set "
            "aside; one seed each. In bold what the tables have: the best, if it is better than the default by "
            f"{MARGIN:g}.\n",
            markdown(table),
        ]
    if waiting:
        parts.append(f"Not all tries have records yet: {', '.join(waiting)}.\n")
    return "\n".join(parts)


def _scores(row: str, found: Findings) -> list[str]:
    return [shown_score(measured(found[each][0], "knn")) for each in tries(row)]


def _line(row: str, scores: Sequence[str]) -> list[str]:
    return [ROWS[row].title, *(_try(row, values, score) for values, score in zip(TRIES[row], scores, strict=True))]


def _try(row: str, values: Mapping[str, Any], score: str) -> str:
    usual = cell(HOME, row).experiment(0).flat()
    chosen = all(usual[key] == value for key, value in values.items())
    return f"{assignments(values)}: " + (f"**{score}**" if chosen else score)
