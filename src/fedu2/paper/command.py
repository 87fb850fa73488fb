"""`fedu2 paper`: list, run, and the tables and figures by name."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fedu2.console import Progress
from fedu2.errors import OutOfTime, UsageError
from fedu2.federation.callbacks import Callback
from fedu2.federation.deadline import Deadline
from fedu2.files import write_atomically
from fedu2.paper.campaign import Campaign, choose_cells
from fedu2.paper.page import gather, page
from fedu2.paper.plan import FIGURE_METHODS, PROTOCOLS, Cell, Series, exhibits
from fedu2.paper.records import Record
from fedu2.paper.tables import Sheet, markdown, measured, readable, sheets

if TYPE_CHECKING:  # drawing is imported where something is drawn: cells are trained on machines without it
    from fedu2.report.drawing import Drawing
    from fedu2.report.figures.sweep import Point

__all__ = ["draw_methods", "draw_sweep", "list_exhibits", "parse_seeds", "run_cells", "show_exhibit", "write_page"]


MOST_SEEDS = 1000


def list_exhibits(console: Console, name: str | None, results: Path) -> None:
    """`fedu2 paper list`: the exhibits, or the cells of one, with what there is of them."""
    if name is None:
        table = _grid("name", "cells", "with records", "")
        for key in exhibits:
            cells = exhibits[key].all_cells()
            begun = "" if exhibits[key].of_runs else str(sum(bool(readable(cell, results)[0]) for cell in cells))
            table.add_row(key, str(len(cells)), begun, escape(exhibits[key].title))
        console.print(table)
        return
    table = _grid("cell", "records")
    for cell in exhibits[name].all_cells():
        found, trouble = readable(cell, results)
        table.add_row(cell.name, escape("; ".join([*trouble, *map(_state, found)])))
    console.print(table)


def run_cells(
    console: Console,
    name: str,
    patterns: Sequence[str],
    seeds: Sequence[int],
    campaign: Campaign,
    time_limit: float | None,
) -> None:
    """`fedu2 paper run`."""
    cells = choose_cells(exhibits[name].all_cells(), [part for text in patterns for part in text.split(",") if part])
    deadline = Deadline(time_limit)

    def watch(cell: Cell, seed: int) -> list[Callback]:
        return [Progress(console, f"{cell.name}, seed {seed}")]

    for record in campaign.play(cells, seeds, deadline, watch):
        console.print(f"{record.cell}: {_state(record)} → {record.path}", highlight=False, soft_wrap=True)
    # As they are now: other processes may have had a part in them, or be still at it.
    records = [campaign.existing(cell, seed) for seed in seeds for cell in cells]
    done = sum(record is not None and campaign.complete(record) for record in records)
    if done < len(records):
        raise OutOfTime(f"{done} of {len(records)} runs are complete; the same command goes on with the others")


def show_exhibit(console: Console, name: str, results: Path, as_markdown: bool) -> None:
    """`fedu2 paper table1`: ours beside the paper's."""
    found = sheets(name, exhibits[name], results)
    if as_markdown:
        print("\n".join(markdown(sheet) for sheet in found), end="")  # as it is, without the console's wrapping
        return
    for sheet in found:
        _print_sheet(console, sheet)
        for remark in sheet.remarks:
            console.print(f"  {remark}", style="dim", highlight=False, markup=False, soft_wrap=True)


def write_page(console: Console, results: Path, out: Path | None) -> None:
    """`fedu2 paper page`: everything that the records show."""
    text = page(gather(results))
    if out is None:
        print(text, end="")  # as it is, without the console's wrapping
        return
    write_atomically(out, text)
    console.print(f"Written: {out}", highlight=False, markup=False, soft_wrap=True)


def parse_seeds(text: str) -> list[int]:
    """`0,1,2` or `0-2`."""
    try:
        first, _, last = text.partition("-")
        span = range(int(first), int(last) + 1) if last else range(0)
        found = list(span[: MOST_SEEDS + 1]) if last else [int(part) for part in text.split(",")]
    except ValueError:
        found = []
    if not found or min(found) < 0 or len(found) > MOST_SEEDS:
        raise UsageError(f"--seeds {text}: write 0, or 0,1,2, or 0-2")
    return found


def _state(record: Record) -> str:
    scores = {title: record.score(protocol) for protocol, title in PROTOCOLS.items()}
    shown = ", ".join(f"{title} {score:.2f}" for title, score in scores.items() if score is not None)
    planned = record.content["experiment"]["rounds"]
    played = f"{record.rounds} rounds" if record.finished else f"round {record.rounds} of {planned}"
    return f"seed {record.seed}: {played} in {record.seconds() / 60:.1f} min" + (f", {shown}" if shown else "")


def _grid(*columns: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold", no_wrap=column in ("name", "cell"))
    return table


def _print_sheet(console: Console, sheet: Sheet) -> None:
    """Without the differences where the console is too narrow for them; figures are never cut."""
    table = _rendered(sheet)
    if _width(console, table) > console.width:
        table = _rendered(sheet.without("difference"))
    table.width = _width(console, table)
    console.print(table, crop=False)


def _width(console: Console, table: Table) -> int:
    """What a table takes if nothing in it is wrapped."""
    return table.__rich_measure__(console, console.options.update(width=10_000)).maximum


def _rendered(sheet: Sheet) -> Table:
    table = Table(title=escape(sheet.title), title_justify="left", title_style="bold")
    for position, column in enumerate(sheet.header):
        table.add_column(column, justify="right" if position else "left")
    for row in sheet.rows:
        table.add_row(*(escape(text) for text in row))
    return table


def draw_sweep(console: Console, name: str, results: Path, out: Path) -> None:
    """Lines of a sweep, as far as there are records."""
    from fedu2.report.drawing import Drawing
    from fedu2.report.figures.sweep import sweep

    exhibit = exhibits[name]
    points = {line.title: _points(line, exhibit.protocols[0], results) for line in exhibit.series}
    if not any(points.values()):
        console.print("There is no finished record yet, so nothing is drawn.")
        return
    protocol = PROTOCOLS[exhibit.protocols[0]]
    drawing = Drawing(name, exhibit.title, "", sweep(points, exhibit.axis, f"accuracy, {protocol} (%)"))
    _save(console, drawing, name, out)


def draw_methods(console: Console, name: str, figure: str, runs: Path, seed: int, out: Path) -> None:
    """Figures 1 to 3: four methods side by side, from the runs of their cells."""
    from fedu2.report.draw import drawings

    begun = Campaign(runs, Path()).begun(FIGURE_METHODS, seed)
    drawing = drawings(list(begun.values()), [figure], labels=[cell.title for cell in begun])[figure]
    _save(console, drawing, name, out)


def _points(line: Series, protocol: str, results: Path) -> list[Point]:
    from fedu2.report.figures.sweep import Point

    scores = {x: measured(readable(cell, results)[0], protocol) for x, cell in line.cells.items()}
    return [Point(x, s.mean, s.deviation, len(s.values)) for x, s in scores.items() if s.values]


def _save(console: Console, drawing: Drawing, name: str, out: Path) -> None:
    from fedu2.report.drawing import save

    for suffix in (".png", ".svg"):
        save(drawing, out / f"{name}{suffix}")
        console.print(f"Drawn: {out / name}{suffix}", highlight=False, soft_wrap=True)
