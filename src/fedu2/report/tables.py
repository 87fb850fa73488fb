"""The tables of the page, as plain text: runs are columns, what is told of them are rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from fedu2.console import span
from fedu2.errors import UsageError
from fedu2.experiment import Experiment
from fedu2.methods import resolve, title_of
from fedu2.report.content import Score, Sheet
from fedu2.report.curves import Curve
from fedu2.report.words import NOTHING, number, percent, tenths

__all__ = [
    "Row",
    "Table",
    "client_table",
    "difference_table",
    "environment_table",
    "number_table",
    "summary_table",
]

PROTOCOLS = {"knn": "kNN", "linear": "linear probe", "finetune": "fine-tuning", "supervised": "from scratch"}
ENCODERS = {"last": "", "best": "best round", "untrained": "untrained"}


@dataclass(frozen=True)
class Row:
    """A label and a cell for each column; `best` are the columns to emphasise."""

    label: str
    cells: Sequence[str]
    best: Sequence[int] = ()


@dataclass(frozen=True)
class Table:
    """Rows under titles, which may be empty."""

    caption: str
    columns: Sequence[str]
    groups: Sequence[tuple[str, Sequence[Row]]]
    corner: str = ""
    numeric: bool = field(default=True, kw_only=True)  # cells are set flush right
    of_runs: bool = field(default=True, kw_only=True)  # a column for each run, in the runs' colours


def summary_table(sheets: Sequence[Sheet]) -> Table:
    """What a reader wants first."""

    def setting(label: str, of: Callable[[Experiment], Any]) -> Row:
        return Row(label, [NOTHING if sheet.experiment is None else str(of(sheet.experiment)) for sheet in sheets])

    settings = [
        setting("method", title_of),
        setting("aggregator", lambda e: e.aggregator or NOTHING),
        setting("data", lambda e: e.dataset),
        setting(
            "clients", lambda e: e.clients if e.participation == 1 else f"{e.clients}, {e.participation:.0%} a round"
        ),
        setting("partition", lambda e: f"α = {e.alpha:g}" if e.partition == "dirichlet" else e.partition),
        setting("encoder", lambda e: e.encoder),
        setting("seed", lambda e: e.seed),
        Row("rounds", [_rounds(sheet) for sheet in sheets]),
    ]
    measured = [
        _measured("kNN, last round", [_value(sheet.last("knn")) for sheet in sheets], percent, highest=True),
        Row("kNN, best round", [_at_best(sheet) for sheet in sheets]),
        _measured("kNN, untrained", [sheet.untrained("knn") for sheet in sheets], percent),
        _measured("effective rank", [_value(sheet.last("effective_rank")) for sheet in sheets], tenths),
        _measured("effective rank, untrained", [sheet.untrained("effective_rank") for sheet in sheets], tenths),
    ]
    cost = [
        Row("training time", [span(sheet.seconds) if sheet.seconds else NOTHING for sheet in sheets]),
        _measured(
            "samples per second", [sheet.speed for sheet in sheets], lambda v: NOTHING if v is None else f"{v:.0f}"
        ),
        Row("device", [sheet.environment.get("device", NOTHING) for sheet in sheets]),
    ]
    groups = [("Setting", settings), ("While training", measured), ("Evaluated", _score_rows(sheets)), ("Cost", cost)]
    told = [(title, [row for row in rows if any(cell != NOTHING for cell in row.cells)]) for title, rows in groups]
    return Table("Summary", [sheet.name for sheet in sheets], [group for group in told if group[1]])


def _rounds(sheet: Sheet) -> str:
    planned = sheet.experiment.rounds if sheet.experiment else 0
    return NOTHING if not planned else f"{sheet.played or 0} of {planned}" + ("" if sheet.finished else ", unfinished")


def _value(point: tuple[int, float] | None) -> float | None:
    return None if point is None else point[1]


def _at_best(sheet: Sheet) -> str:
    best = sheet.best("knn")
    return NOTHING if best is None else f"{percent(best[1])} (round {best[0]})"


def _measured(
    label: str,
    values: Sequence[float | None],
    show: Callable[[float | None], str] = number,
    highest: bool = False,
) -> Row:
    return Row(label, [show(value) for value in values], _highest(values) if highest else ())


def _highest(values: Sequence[float | None]) -> list[int]:
    """The columns with the highest value as it is shown; none where there is nothing to compare."""
    shown = [None if value is None else round(value, 1) for value in values]
    known = [value for value in shown if value is not None]
    return [i for i, value in enumerate(shown) if value == max(known)] if len(set(known)) > 1 else []


def _score_rows(sheets: Sequence[Sheet]) -> list[Row]:
    """What `fedu2 evaluate` measured: a row for each protocol, encoder and data."""
    order = list(ENCODERS)
    keys = dict.fromkeys(key for sheet in sheets for key in sheet.scores)
    rows = []
    for protocol, encoder, data in sorted(keys, key=lambda key: order.index(key[1]) if key[1] in order else len(order)):
        kind, _, share = protocol.partition(" ")
        own = all(sheet.experiment is None or sheet.experiment.dataset == data for sheet in sheets)
        words = [PROTOCOLS.get(kind, kind), share and f"{share} of the labels", ENCODERS.get(encoder, encoder)]
        label = ", ".join(filter(None, words)) + ("" if own else f", on {data}")
        scores = [sheet.scores.get((protocol, encoder, data)) for sheet in sheets]
        means = [None if score is None else score.mean for score in scores]
        cells = [_score(score, sheet, encoder) for score, sheet in zip(scores, sheets, strict=True)]
        rows.append(Row(label, cells, _highest(means)))
    return rows


def _score(score: Score | None, sheet: Sheet, encoder: str) -> str:
    if score is None:
        return NOTHING
    spread = f" ± {score.deviation:.1f}" if score.seeds > 1 else ""
    notes = [f"{score.seeds} seeds"] if score.seeds > 1 else []
    notes += [f"round {score.round}"] if encoder != "untrained" and score.round != sheet.played else []
    return f"{score.mean:.1f}{spread} %" + (f" ({', '.join(notes)})" if notes else "")


def difference_table(sheets: Sequence[Sheet]) -> Table:
    """The keys in which the runs differ; of a single run, those that differ from its method's defaults."""
    begun = [(sheet.name, sheet.experiment) for sheet in sheets if sheet.experiment is not None]
    flats = [experiment.flat() for _, experiment in begun]
    columns = [name for name, _ in begun]
    caption = "Keys in which the runs differ"
    if len(begun) == 1:
        flats.append(_defaults(begun[0][1]).flat())
        columns.append("default")
        caption = "Keys that differ from the defaults"
    keys = dict.fromkeys(key for flat in flats for key in flat)
    told = [(key, [_shown(flat.get(key)) for flat in flats]) for key in keys]
    rows = [Row(key, cells) for key, cells in told if len(set(cells)) > 1]
    coloured = len(begun) == len(sheets) > 1
    return Table(caption, columns, [("", rows)] if rows else [], "key", numeric=False, of_runs=coloured)


def _defaults(experiment: Experiment) -> Experiment:
    plain = Experiment.parse({"method": experiment.method, "dataset": experiment.dataset})
    try:
        return resolve(plain)
    except UsageError:  # a method of the user's own, not registered here
        return plain


def _shown(value: Any) -> str:
    return NOTHING if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def environment_table(sheets: Sequence[Sheet]) -> Table:
    """What a result may depend on beside its experiment; written when a run ends."""
    keys = dict.fromkeys(key for sheet in sheets for key in sheet.environment)
    rows = [Row(key, [sheet.environment.get(key, NOTHING) for sheet in sheets]) for key in keys]
    return Table("Environment", [sheet.name for sheet in sheets], [("", rows)] if rows else [], numeric=False)


CLIENT_COLUMNS = {
    "images": "images",
    "client_loss": "loss",
    "eua.weights": "EUA weight",
    "eua.rates": "EUA rate",
    "eua.norms": "update norm",
}


def client_table(sheet: Sheet) -> Table:
    """The clients of the last round."""
    names = [name for name in CLIENT_COLUMNS if name in sheet.clients]
    names += [name for name in sheet.clients if name not in CLIENT_COLUMNS and name != "client"]
    columns = [CLIENT_COLUMNS.get(name, name) for name in names]
    clients = sheet.clients.get("client", ())
    rows = [Row(str(client), [number(sheet.clients[name][i], 3) for name in names]) for i, client in enumerate(clients)]
    return Table(f"{sheet.name}, round {sheet.played}", columns, [("", rows)] if rows else [], "client", of_runs=False)


def number_table(curve: Curve, sheets: Sequence[Sheet]) -> Table:
    """A curve in figures: a row for each round that has a value."""
    by_run = [dict(sheet.series.get(curve.key, ())) for sheet in sheets]
    rounds = sorted({round_ for values in by_run for round_ in values})
    rows = [Row(str(round_), [number(values.get(round_)) for values in by_run]) for round_ in rounds]
    unit = f", {curve.unit}" if curve.unit else ""
    return Table(f"{curve.title}{unit}", [sheet.name for sheet in sheets], [("", rows)], "round")
