"""How fast methods learn: kNN in the course of training, by round, from the records of one setting."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from fedu2.evaluation.judge import Score
from fedu2.paper.plan import HOME, Cell, exhibits, home_cells, setting_title
from fedu2.paper.records import Record
from fedu2.paper.rows import RECIPE
from fedu2.paper.tables import Findings, Sheet, finished, markdown, shown_score

__all__ = ["pace_section"]

TITLE = "How fast they learn"
ROUNDS = (*range(10, RECIPE["rounds"], 10), RECIPE["rounds"])


def pace_section(found: Findings) -> str:
    """kNN every ten rounds of the runs in both tables; rows of which nothing is known are left out."""
    rows = [_row(cell, finished(found[cell])) for cell in home_cells()]
    known = [row for row in rows if any(row[1:])]
    head = f"## {TITLE}: {setting_title(HOME)} (not in the paper)\n"
    if not known:
        return f"{head}\nNo finished records yet.\n"
    about = (
        "kNN on the test images after 10, 20, ... rounds of the runs above. Their rate falls to 0 over all "
        f"{RECIPE['rounds']} rounds, so that a figure in the middle is not what a run of so many rounds would reach: "
        f'"{exhibits["rounds"].title.partition(":")[0]}" asks that. GB are what all clients together sent in a run.'
    )
    header = ["method", *(f"round {round_}" for round_ in ROUNDS), "GB", "seeds"]
    return f"{head}\n{about}\n\n{markdown(Sheet('', header, known))}"


def _row(cell: Cell, records: Sequence[Record]) -> list[str]:
    if not records:
        return [cell.title]
    sent = fmean(record.bytes_sent() for record in records) / 1e9
    return [cell.title, *(shown_score(_after(records, n)) for n in ROUNDS), f"{sent:.1f}", str(len(records))]


def _after(records: Sequence[Record], round_: int) -> Score:
    """One value a seed, of those whose encoder was judged after this round."""
    played = (entry for record in records for entry in record.content["history"] if entry["round"] == round_)
    return Score(tuple(float(entry["knn"]) for entry in played if "knn" in entry))
