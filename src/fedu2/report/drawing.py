"""A figure with its words, and how it leaves the program: as SVG inside a page, or as a file."""

from __future__ import annotations

import io
import re
from dataclasses import dataclass
from html import escape
from pathlib import Path

from matplotlib.figure import Figure

from fedu2.errors import UsageError
from fedu2.files import atomic_file
from fedu2.report.style import INK, styled

__all__ = ["Drawing", "save", "svg"]

DPI = 200
NO_METADATA = dict.fromkeys(("Creator", "Date", "Format", "Type"))  # the same figure is the same bytes on every day
PROLOG = '<?xml version="1.0" encoding="utf-8"?>\n'


@dataclass(frozen=True, eq=False)
class Drawing:
    """A figure that can be understood without the program that made it.

    name: short, without spaces; title: what it shows; caption: one or two sentences on what to see in it.
    """

    name: str
    title: str
    caption: str
    figure: Figure

    def __post_init__(self) -> None:
        with styled():
            self.figure.draw_without_rendering()
        self.figure.set_layout_engine(
            "none"
        )  # places stay as found now: every drawing of text would move them a little


def svg(drawing: Drawing, ink: str = "currentColor", background: str = "none") -> str:
    """An <svg> element to stand in an HTML page beside others: ids carry the figure's name, text and axes are `ink`."""
    file = io.StringIO()
    with styled():
        drawing.figure.savefig(file, format="svg", facecolor=background, dpi=DPI, metadata=NO_METADATA)
    element = file.getvalue()
    element = element[element.index("<svg") :].replace(INK, ink)
    element = re.sub(r'( id="|href="#|url\(#)', rf"\g<1>{drawing.name}-", element)
    return element.replace("<svg ", f'<svg role="img" aria-label="{escape(drawing.title)}" ', 1)


def save(drawing: Drawing, path: Path, dpi: int = DPI) -> None:
    """Write a .png or .svg file, on white."""
    with atomic_file(path) as temporary:
        if path.suffix == ".svg":
            temporary.write_text(PROLOG + svg(drawing, INK, "white"), encoding="utf-8")
        elif path.suffix == ".png":
            with styled():
                drawing.figure.savefig(temporary, format="png", facecolor="white", dpi=dpi, metadata={"Software": None})
        else:
            raise UsageError(f"{path}: figures are written as .png or .svg")
