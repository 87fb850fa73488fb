"""Tables from records: ours beside the published figure, the difference, and on how many seeds it rests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from fedu2.errors import DataError
from fedu2.evaluation.judge import Score
from fedu2.paper.plan import PROTOCOLS, Cell, Exhibit, published, setting_title
from fedu2.paper.records import Record, records_of

__all__ = [
    "Findings",
    "Found",
    "Group",
    "Sheet",
    "assignments",
    "finished",
    "groups",
    "markdown",
    "measured",
    "readable",
    "sheet",
    "sheets",
    "shown_score",
]


@dataclass(frozen=True)
class Sheet:
    """A rendered table: plain text cells, empty where nothing is known, and remarks below it."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    remarks: Sequence[str] = ()

    def without(self, column: str) -> Sheet:
        """The same without the columns of that name."""
        kept = [i for i, name in enumerate(self.header) if name != column]
        rows = [[row[i] for i in kept] for row in self.rows]
        return replace(self, header=[self.header[i] for i in kept], rows=rows)


@dataclass(frozen=True)
class Group:
    """Cells that stand in one sheet, each with its label: a setting of a table, or a line of a figure."""

    title: str
    cells: Sequence[Cell]
    labels: Sequence[str]


Found = tuple[Sequence[Record], Sequence[str]]
"""The records of a cell, and what is wrong with them."""

Findings = Mapping[Cell, Found]
"""What there is of every cell on a page."""


def finished(found: Found) -> list[Record]:
    """The records that count."""
    return [record for record in found[0] if record.finished]


def measured(records: Sequence[Record], protocol: str) -> Score:
    """One value a seed, from finished records; those of other settings of the protocol do not count."""
    scores = [record.score(protocol) for record in records]
    return Score(tuple(score for score in scores if score is not None))


def groups(exhibit: Exhibit) -> list[Group]:
    """The settings of a table, or the lines of a figure."""
    if exhibit.series:
        return [Group(line.title, list(line.cells.values()), [f"{x:g}" for x in line.cells]) for line in exhibit.series]
    settings = {cell.setting: [c for c in exhibit.cells if c.setting == cell.setting] for cell in exhibit.cells}
    return [Group(setting_title(name), cells, [cell.title for cell in cells]) for name, cells in settings.items()]


def sheets(name: str, exhibit: Exhibit, results: Path) -> list[Sheet]:
    """A sheet for every group of an exhibit."""
    return [sheet(name, exhibit, group, [readable(cell, results) for cell in group.cells]) for group in groups(exhibit)]


def sheet(name: str, exhibit: Exhibit, group: Group, found: Sequence[Found]) -> Sheet:
    """The sheet of a group, from what was found of each of its cells."""
    header = [exhibit.axis or "method"]
    for protocol in exhibit.protocols:
        header += [PROTOCOLS[protocol], *(["paper", "difference"] if name in published() else [])]
    header.append("seeds")
    rows: list[list[str]] = []
    remarks: list[str] = []
    for label, cell, (records, trouble) in zip(group.labels, group.cells, found, strict=True):
        remarks += [*trouble, *(_unfinished(record) for record in records if not record.finished)]
        rows.append([label, *_figures(name, exhibit, cell, records)])
    return Sheet(f"{exhibit.title}: {group.title}", header, rows, remarks)


def markdown(sheet: Sheet, heading: str = "###") -> str:
    """The sheet as a Markdown table; without a title, the table alone."""
    lines = [
        *([f"{heading} {sheet.title}", ""] if sheet.title else []),
        _line(sheet.header),
        "| --- |" + " ---: |" * (len(sheet.header) - 1),
    ]
    lines += [_line(row) for row in sheet.rows]
    lines += ["", *(f"- {remark}" for remark in sheet.remarks)] if sheet.remarks else []
    return "\n".join(lines) + "\n"


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _figures(name: str, exhibit: Exhibit, cell: Cell, records: Sequence[Record]) -> list[str]:
    theirs = published().get(name, {}).get(cell.setting, {}).get(cell.row)
    texts: list[str] = []
    counts: set[int] = set()
    for position, protocol in enumerate(exhibit.protocols):
        ours = measured(records, protocol)
        texts.append(shown_score(ours))
        if name in published():
            texts += [
                f"{theirs[position]:.2f}" if theirs else "",
                _difference(ours, theirs[position] if theirs else None),
            ]
        counts.add(len(ours.values))
    return [*texts, "/".join(map(str, sorted(counts - {0})))]


def shown_score(score: Score) -> str:
    """Mean and deviation; empty where nothing was measured."""
    if not score.values:
        return ""
    return f"{score.mean:.2f}" + (f" ± {score.deviation:.2f}" if len(score.values) > 1 else "")


def _difference(ours: Score, theirs: float | None) -> str:
    return f"{ours.mean - theirs:+.2f}" if ours.values and theirs is not None else ""


def readable(cell: Cell, results: Path) -> tuple[list[Record], list[str]]:
    """The records of a cell; one that cannot be trusted is told, and the cell stays empty."""
    try:
        return list(records_of(cell, results)), []
    except DataError as error:
        return [], [str(error)]


def _unfinished(record: Record) -> str:
    planned = record.content["experiment"]["rounds"]
    return f"{record.cell}, seed {record.seed}: round {record.rounds} of {planned}, not in the table"


def assignments(values: Mapping[str, Any]) -> str:
    """`key=value`, as on the command line."""
    return ", ".join(_assignment(key, value) for key, value in values.items())


def _assignment(key: str, value: Any) -> str:
    text = yaml.safe_dump(value, default_flow_style=True, width=10**6).removesuffix("...\n").strip()
    return f"`{key}={text}`"
