"""From run directories to one HTML file that needs nothing else: no network, no other file."""

from __future__ import annotations

import base64
import hashlib
import json
import logging
import os
import re
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from fedu2._version import __version__
from fedu2.errors import FedU2Error, UsageError
from fedu2.files import write_atomically
from fedu2.report.content import Sheet, read_sheets
from fedu2.report.curves import curves_of
from fedu2.report.tables import (
    Row,
    Table,
    client_table,
    difference_table,
    environment_table,
    number_table,
    summary_table,
)
from fedu2.report.words import headline, percent, verdict, warnings
from fedu2.run import Run

__all__ = ["chart_data", "embedded_json", "page", "sections", "write_report"]

log = logging.getLogger("fedu2")

LABEL = 20  # letters of a run's name that figures have room for
COLOURS = 6  # as many as page.css and figures have; markers and dashes tell runs beyond them apart


def write_report(paths: Sequence[Path], out: Path | None = None, *, figures: bool = True) -> Path:
    """Write the page on these runs, by default beside the run or, for several, in the current directory."""
    sheets = read_sheets(paths)
    target = out or (paths[0] / "report.html" if len(paths) == 1 else Path("report.html"))
    if target.is_dir():
        raise UsageError(f"{target} is a directory: --out names a file")
    if target.parent.exists() and not os.access(target.parent, os.W_OK):  # told before a round is played for figures
        raise UsageError(f"cannot write to {target.parent}: choose a place with --out")
    write_atomically(target, page(sheets, drawn_figures(sheets) if figures else ""))
    return target


def page(sheets: Sequence[Sheet], figures: str = "", *, live: bool = False) -> str:
    """The page as HTML; a live one asks its server for news."""
    style, script = _asset("page.css"), _asset("chart.js") + _asset("page.js")
    policy = {
        "default-src": "'none'",
        "style-src": "'unsafe-inline'",  # figures carry style attributes
        "script-src": f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'",
        "img-src": "data:",
        "base-uri": "'none'",
        "form-action": "'none'",
        **({"connect-src": "'self'"} if live else {}),
    }
    parts = {
        "policy": escape("; ".join(f"{name} {value}" for name, value in policy.items())),
        "title": escape(headline(sheets)),
        "byline": escape(f"fedu2 {__version__} · {datetime.now().strftime('%-d %B %Y, %H:%M')}"),
        "figures": figures,
        "figures_link": '<a href="#figures">Figures</a>' if figures else "",
        "style": style,
        "script": script,
        "data": embedded_json({**chart_data(sheets), "live": live}),
        **sections(sheets),
    }
    # In one pass: what is filled in is not looked at again.
    return re.sub(r"\{\{(\w+)\}\}", lambda found: parts[found[1]], _asset("page.html"))


def sections(sheets: Sequence[Sheet]) -> dict[str, str]:
    """The parts of the page that grow with the runs, as HTML."""
    curves = curves_of(sheets)
    folded = {curve: _folded(curve.title, _table(number_table(curve, sheets))) for curve in curves}
    numbers = [table for curve, table in folded.items() if curve.main]
    more = "".join(table for curve, table in folded.items() if not curve.main)
    if more:
        numbers.append(_folded("More numbers", more))
    clients = [_folded(sheet.name, _table(client_table(sheet))) for sheet in sheets if sheet.clients]
    return {
        "verdicts": "".join(_card(sheet, place) for place, sheet in enumerate(sheets)),
        "summary": _table(summary_table(sheets)),
        "configuration": _configuration(sheets),
        "clients": "".join(clients) or _nothing("No round has been played yet."),
        "numbers": "".join(numbers) or _nothing("Nothing has been measured yet."),
        "environment": _table(environment_table(sheets), "It is written when a run ends."),
    }


def chart_data(sheets: Sequence[Sheet]) -> dict[str, Any]:
    """What the script draws: curves, and the runs' points (round, value), the value null where it is not a number."""
    curves = curves_of(sheets)
    drawn = {curve.key for curve in curves}
    runs = [
        {
            "key": str(sheet.path),
            "name": sheet.name,
            "series": {key: points for key, points in sheet.series.items() if key in drawn},
        }
        for sheet in sheets
    ]
    return {"title": headline(sheets), "curves": [asdict(curve) for curve in curves], "runs": runs}


def embedded_json(value: Any) -> str:
    """JSON that can stand in a <script> element: no character of it can end the element or begin a comment."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))  # ASCII: U+2028 and the like are escaped
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def drawn_figures(sheets: Sequence[Sheet]) -> str:
    """The drawings of the runs as inline SVG, without curves, of which the page has its own.

    What cannot be drawn is told, and left out.
    """
    from fedu2.report.draw import drawings, svg

    try:
        names = [sheet.name for sheet in sheets]
        fitting = max(map(len, names)) <= LABEL  # else the figures' own names, by method and keys that differ
        drawn = drawings([Run(sheet.path) for sheet in sheets], labels=names if fitting else None)
    except FedU2Error as error:
        log.warning("the page has no figures: %s", error)
        return ""
    shown = [drawing for name, drawing in drawn.items() if name != "curves"]
    figures = [_drawing(svg(drawing), drawing.title, drawing.caption) for drawing in shown]
    return f'<section id="figures"><h2>Figures</h2>{"".join(figures)}</section>' if figures else ""


def _drawing(svg: str, title: str, caption: str) -> str:
    return (
        f'<figure class="drawing"><div class="wide" role="group" aria-label="{escape(title)}" tabindex=0>{svg}</div>'
        f"<figcaption><b>{escape(title)}.</b> {escape(caption)}</figcaption></figure>"
    )


def _card(sheet: Sheet, place: int) -> str:
    last, before = sheet.last("knn"), sheet.untrained("knn")
    figure = f'<p class="figure">{percent(last[1])}<small>kNN</small></p>' if last else ""
    points = _gain(last[1] - before) if last and before is not None else ""
    alarms = "".join(f'<p class="warning">{_breakable(words)}</p>' for words in warnings(sheet))
    return (
        f'<article class="card c{place % COLOURS}"><h3>{escape(headline([sheet]))}</h3>'
        f'<p class="name">{_breakable(sheet.name)}</p>'
        f'<div class="figures">{figure}<p class="gain">{points}</p></div>'
        f"<p>{_breakable(verdict(sheet))}</p>{alarms}</article>"
    )


def _gain(points: float) -> str:
    return f"{points:+.1f} points".replace("-", "−") if abs(points) >= 0.05 else "±0 points"


def _configuration(sheets: Sequence[Sheet]) -> str:
    alike = "The runs have the same configuration." if len(sheets) > 1 else "All keys have their defaults."
    full = [
        _folded(f"{sheet.name}, all keys", f"<pre tabindex=0>{escape(sheet.experiment.to_yaml())}</pre>")
        for sheet in sheets
        if sheet.experiment is not None
    ]
    return _table(difference_table(sheets), alike) + "".join(full)


def _folded(title: str, content: str) -> str:
    return f'<details data-key="{escape(title)}"><summary>{_breakable(title)}</summary>{content}</details>'


def _table(table: Table, otherwise: str = "") -> str:
    """A table in a box of its own that scrolls, so that the page need not."""
    if not table.groups:
        return _nothing(otherwise)
    colours = [f' class="c{place % COLOURS}"' if table.of_runs else "" for place in range(len(table.columns))]
    names = zip(table.columns, colours, strict=True)
    head = "".join(f'<th scope="col"{colour}>{_breakable(name)}</th>' for name, colour in names)
    body = "".join(_group(title, rows, len(table.columns)) for title, rows in table.groups)
    return (
        f'<div class="scroll" role="region" aria-label="{escape(table.caption)}" tabindex=0>'
        f'<table class="{"numeric" if table.numeric else "words"}"><caption>{escape(table.caption)}</caption>'
        f'<thead><tr><th scope="col">{escape(table.corner)}</th>{head}</tr></thead>{body}</table></div>'
    )


def _group(title: str, rows: Sequence[Row], columns: int) -> str:
    head = f'<tr class="group"><th scope="rowgroup" colspan="{columns + 1}">{escape(title)}</th></tr>' if title else ""
    return f"<tbody>{head}{''.join(_row(row) for row in rows)}</tbody>"


def _row(row: Row) -> str:
    cells = (f"<td{' class=best' if i in row.best else ''}>{escape(cell)}</td>" for i, cell in enumerate(row.cells))
    return f'<tr><th scope="row">{escape(row.label)}</th>{"".join(cells)}</tr>'


def _nothing(sentence: str) -> str:
    return f'<p class="nothing">{escape(sentence)}</p>'


def _breakable(text: str) -> str:
    """Escaped, and with places where a long name or path may break."""
    return re.sub(r"([/_-])", r"\1<wbr>", escape(text))


def _asset(name: str) -> str:
    return files("fedu2.report").joinpath("assets", name).read_text(encoding="utf-8")
