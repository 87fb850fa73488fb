"""How fast methods learn: kNN in the course of training, by round, from the records of one setting."""

from __future__ import annotations

from collections.abc import Sequence

from fedu2.evaluation.judge import Score
from fedu2.paper.plan import HOME, Cell, home_cells, setting_title
from fedu2.paper.records import Record
from fedu2.paper.rows import RECIPE
from fedu2.paper.tables import Findings, Sheet, markdown, shown_score

__all__ = ["pace_section"]

TITLE = "How fast they learn"
ROUNDS = tuple(range(10, RECIPE["rounds"] + 1, 10))


def pace_section(found: Findings) -> str:
    """kNN every ten rounds of the runs in both tables; rows of which nothing is known are left out."""
    known = [row for cell in home_cells() if any((row := _row(cell, found[cell][0]))[1:])]
    head = f"## {TITLE}: {setting_title(HOME)} (not in the paper)\n"
    if not known:
        return f"{head}\nNo finished records yet.\n"
    about = (
        "kNN on the test images by round, in the course of the runs above. Every run has one schedule, over all of "
        "its rounds, so that what stands in the middle is no result of a shorter run; for that see the section before."
    )
    return f"{head}\n{about}\n\n{markdown(Sheet('', ['method', *map(str, ROUNDS)], known))}"


def _row(cell: Cell, records: Sequence[Record]) -> list[str]:
    finished = [record for record in records if record.finished]
    return [cell.title, *(shown_score(_after(finished, round_)) for round_ in ROUNDS)]


def _after(records: Sequence[Record], round_: int) -> Score:
    """One value a seed, of those whose encoder was judged after this round."""
    played = (entry for record in records for entry in record.content["history"] if entry["round"] == round_)
    return Score(tuple(float(entry["knn"]) for entry in played if "knn" in entry))
