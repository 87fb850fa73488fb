"""The page of all results: Markdown, from records and from nothing else.

`gather` reads; everything else is a pure function of what it found.
"""

from __future__ import annotations

import html
import os
import re
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedu2.experiment import Experiment
from fedu2.files import shown
from fedu2.paper.pace import pace_section
from fedu2.paper.plan import HOME, OWN_TABLES, PROTOCOLS, TABLES, Cell, Exhibit, exhibits
from fedu2.paper.records import Record
from fedu2.paper.rows import RECIPE, ROWS
from fedu2.paper.tables import Findings, Found, Group, Sheet, assignments, finished, groups, markdown, readable, sheet
from fedu2.paper.tuned import tuning_section

__all__ = ["SWEEPS", "emphasised", "gather", "judged", "machines", "minutes", "page"]

SWEEPS = ("figure4", "figure5a", "figure5b", "rounds", "rates")
NAMED = ("dataset", "clients", "alpha")  # what the name of a setting tells


def gather(results: Path) -> dict[Cell, Found]:
    """The records of all cells that the page shows; troubles name files as they lie under `results`."""
    cells = dict.fromkeys(
        cell for name in (*TABLES, *OWN_TABLES, *SWEEPS, "tuning") for cell in exhibits[name].all_cells()
    )
    found: dict[Cell, Found] = {}
    for cell in cells:
        records, trouble = readable(cell, results)
        found[cell] = records, [text.replace(f"{results}{os.sep}", "") for text in trouble]
    return found


def page(found: Findings) -> str:
    """Everything: what is shown and how it was made, the tables, those of our own, the sweeps, the pace, the tuning."""
    shown_exhibits = [_section(name, exhibits[name], found) for name in (*TABLES, *OWN_TABLES, *SWEEPS)]
    return "\n".join([_introduction(), *shown_exhibits, pace_section(found), tuning_section(found)])


def judged(records: Sequence[Record], protocols: Sequence[str]) -> list[Record]:
    """The records that have all of these scores; the time of others is not yet that of a whole run."""
    return [record for record in records if all(record.score(name) is not None for name in protocols)]


def minutes(records: Sequence[Record]) -> str:
    """Of a run, training and judging: the mean."""
    return f"{statistics.fmean(record.seconds() for record in records) / 60:.1f}" if records else ""


def machines(records: Sequence[Record]) -> list[str]:
    """On what the records were made, most of them first: `NVIDIA H200 (3 runs)`."""
    return _counted([_environment(record).get("device", "").removeprefix("cuda: ") for record in records])


def _introduction() -> str:
    return f"""# Results

What the paper shows, as measured with this program, beside what was published. This page is rendered from the records under `results/paper`; no figure in it was typed.

- Accuracies are in percent, of the encoder after the last round: mean ± deviation over seeds of training, where there are several. The best of ours in a column is bold.
- `paper` is the published figure, `difference` ours less the paper's. An empty field: not measured, or not published.
- `minutes` are those of one run, trained and judged by what the table shows and all else that its record has; the mean over its records.

All methods are trained by one recipe: {assignments(RECIPE)}. Settings and rows add to it:

{_additions()}
All else has the default that `fedu2 train --keys` shows, and stands in every record. [The paper as experiments](paper.md) explains cells and records; recipes lie under `recipes/`, each with its commands and its time.

To make it again, beside the records of this repository (here a setting of a table, then this page):

    fedu2 paper run {TABLES[0]} --cells {HOME} --seeds 0-2 --results runs/records data.root=/path/to/cifar
    fedu2 paper page --results runs/records

Each protocol is repeated three times on an encoder, unless `--protocol-seeds` says how often; what stands here is told below each table.
"""  # noqa: E501 (as it is to stand in the page)


def _additions() -> str:
    """What cells set beyond the recipe and their names: a line for every set of additions, with who has it."""
    holders: dict[str, dict[str, None]] = {}
    for cell in (cell for name in TABLES for cell in exhibits[name].cells):
        row = ROWS[cell.row].settings
        own = {key: value for key, value in row.items() if key not in ("method", "objective")}
        setting = {key: value for key, value in _beyond_recipe(cell).items() if key not in row}
        for who, values in ((f"K = {cell.values['clients']}", setting), (cell.title, own)):
            if values:
                holders.setdefault(assignments(values), {})[who] = None
    return "".join(f"- {', '.join(who)}: {values}\n" for values, who in holders.items())


def _beyond_recipe(cell: Cell) -> dict[str, Any]:
    """Values of a cell that neither the recipe, nor a default, nor the name of its setting tells."""
    usual = Experiment.parse({**RECIPE, **{key: cell.values[key] for key in NAMED}}).flat()
    return {key: value for key, value in Experiment.parse(cell.values).flat().items() if value != usual[key]}


def _section(name: str, exhibit: Exhibit, found: Findings) -> str:
    """An exhibit: a sheet for every group with a finished record, and the names of the others."""
    parts = [f"## {exhibit.title}\n"]
    empty: list[str] = []
    waiting: list[str] = []
    for group in groups(exhibit):
        filled = _sheet(name, exhibit, group, found)
        if any(finished(found[cell]) for cell in group.cells):
            parts.append(markdown(filled))
        else:
            empty.append(group.title)
            waiting += filled.remarks
    if empty:
        parts.append(f"No finished records yet: {'; '.join(empty)}.\n")
    if waiting:
        parts.append("".join(f"- {remark}\n" for remark in waiting))
    return "\n".join(parts)


def _sheet(name: str, exhibit: Exhibit, group: Group, found: Findings) -> Sheet:
    """The table's own sheet, with minutes, the best in bold, and where it all comes from."""
    plain = sheet(name, exhibit, group, [found[cell] for cell in group.cells])
    records = [finished(found[cell]) for cell in group.cells]
    rows = [[*row, minutes(judged(own, exhibit.protocols))] for row, own in zip(plain.rows, records, strict=True)]
    remarks = [*map(_plain, plain.remarks), *_origin([record for own in records for record in own])]
    return emphasised(Sheet(group.title, [*plain.header, "minutes"], rows, remarks))


def emphasised(plain: Sheet) -> Sheet:
    """The highest of ours in every column in bold; figures that look the same are the same."""
    rows = [list(row) for row in plain.rows]
    for column, title in enumerate(plain.header):
        if title not in PROTOCOLS.values():
            continue
        means = {row[column]: float(row[column].split()[0]) for row in rows if row[column]}
        for row in rows:
            if row[column] and means[row[column]] == max(means.values()):
                row[column] = f"**{row[column]}**"
    return replace(plain, rows=rows)


def _origin(records: Sequence[Record]) -> list[str]:
    """Remarks on machines, versions, commits, and how often a run was judged."""
    if not records:
        return []
    versions = [f"fedu2 {e.get('fedu2', '?')}, torch {e.get('torch', '?')}" for e in map(_environment, records)]
    commits = [_short(str(record.content.get("commit", ""))) for record in records]
    repetitions = ["/".join(sorted({str(entry["seeds"]) for entry in r.content["evaluation"]})) for r in records]
    changed = "; +: with changes that were not committed" if any(c.endswith("+") for c in commits) else ""
    return [
        f"machines: {'; '.join(machines(records))}",
        f"versions: {'; '.join(_counted(versions))}",
        f"commits: {'; '.join(_counted(commits))}{changed}",
        f"repetitions of each protocol on one encoder: {'; '.join(_counted(repetitions))}",
    ]


def _short(commit: str) -> str:
    return commit[:7] + ("+" if commit.endswith("+") else "")


def _counted(names: Sequence[str]) -> list[str]:
    """Each once with its number of runs, the most frequent first."""
    counts = Counter(_plain(name) or "unknown" for name in names)
    return [f"{name} ({count} run{'s' if count > 1 else ''})" for name, count in counts.most_common()]


def _plain(text: str) -> str:
    """Text of a record, or about one: a line that Markdown, HTML and YAML comments show as it is."""
    return re.sub(r"([\\`*_\[\]|])", r"\\\1", html.escape(shown(text)[:300], quote=False))


def _environment(record: Record) -> Mapping[str, str]:
    """The record's, whatever stands there: its digest proves no more than that it was not changed by a slip."""
    found = record.content.get("environment")
    return {key: str(value) for key, value in found.items()} if isinstance(found, Mapping) else {}
