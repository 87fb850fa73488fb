"""The sentences of the page, and how it writes numbers."""

from __future__ import annotations

from collections.abc import Sequence

from fedu2.evaluation.alarm import sentence
from fedu2.methods import title_of
from fedu2.report.content import Sheet

__all__ = ["NOTHING", "headline", "number", "percent", "tenths", "verdict", "warnings"]

NOTHING = "–"


def number(value: float | None, digits: int = 4) -> str:
    """A number as one reads it: thousands apart, else so many digits; chart.js writes them alike."""
    if value is None:
        return NOTHING
    if abs(value) < 1e15 and (abs(value) >= 1000 or value == int(value)):
        return f"{round(value):,}".replace(",", "\u202f")
    return f"{value:.{digits}g}".replace("e+0", "e").replace("e-0", "e-")


def percent(value: float | None) -> str:
    """An accuracy."""
    return NOTHING if value is None else f"{value:.1f} %"


def tenths(value: float | None) -> str:
    """With one decimal."""
    return NOTHING if value is None else f"{value:.1f}"


def headline(sheets: Sequence[Sheet]) -> str:
    """What the page is about."""
    if len(sheets) == 1:
        experiment = sheets[0].experiment
        return title_of(experiment) if experiment else sheets[0].name
    return f"{len(sheets)} runs compared"


def verdict(sheet: Sheet) -> str:
    """One sentence on how far a run is and what it has learnt."""
    if sheet.experiment is None:
        return f"There is no run at {sheet.path} yet; it is waited for."
    if sheet.played is None:
        return "Begun; no round has been written yet."
    parts = [part for part in (_knn_words(sheet), _rank_words(sheet)) if part] or _loss_words(sheet)
    return f"{_progress(sheet)}: {', and '.join(parts) or 'nothing was measured'}."


def warnings(sheet: Sheet) -> list[str]:
    """What points to a collapse."""
    return [f"Warning: {sentence(name, sign)}." for name, sign in sheet.signs.items()]


def _progress(sheet: Sheet) -> str:
    assert sheet.experiment is not None
    planned, played = sheet.experiment.rounds, sheet.played or 0
    if played == 0:
        return f"Before the first of {planned} rounds"
    if sheet.finished:
        return "After its only round" if played == 1 else f"After all {played} rounds"
    return f"After {played} of {planned} rounds"


def _knn_words(sheet: Sheet) -> str:
    before, last, best = sheet.untrained("knn"), sheet.last("knn"), sheet.best("knn")
    if last is None or best is None:
        return f"kNN accuracy is {percent(before)} without training" if before is not None else ""
    words = f"kNN accuracy is {percent(last[1])}" + ("" if last[0] == sheet.played else f" (round {last[0]})")
    if before is not None:
        gain = last[1] - before
        apart = f"{abs(gain):.1f} points {'above' if gain > 0 else 'below'}" if abs(gain) >= 0.05 else "level with"
        words += f", {apart} the untrained encoder"
    if f"{best[1]:.1f}" != f"{last[1]:.1f}":
        words += f" (at best {percent(best[1])}, in round {best[0]})"
    return words


def _rank_words(sheet: Sheet) -> str:
    before, last = sheet.untrained("effective_rank"), sheet.last("effective_rank")
    if last is None:
        return f"the effective rank is {before:.1f}" if before is not None else ""
    if before is None:
        return f"the effective rank is {last[1]:.1f}"
    moved = "rose" if last[1] > before else "fell"
    return f"the effective rank {moved} from {before:.1f} to {last[1]:.1f}"


def _loss_words(sheet: Sheet) -> list[str]:
    losses = [value for _, value in sheet.values("loss")]
    return [f"the loss went from {losses[0]:.3f} to {losses[-1]:.3f}"] if losses else []
