"""`fedu2 report`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from fedu2.errors import UsageError
from fedu2.report.page import write_report
from fedu2.report.serve import serve_report

__all__ = ["make_report"]


def make_report(
    console: Console, runs: Sequence[Path], out: Path | None, figures: bool, serve: bool, port: int
) -> None:
    """Write the page, or serve it while the runs train."""

    def tell(sentence: str) -> None:
        console.print(sentence, highlight=False, markup=False, soft_wrap=True)

    if serve and out is not None:
        raise UsageError("--serve writes no file: leave out --out, or --serve")
    if serve:
        serve_report(runs, port, lambda address: tell(f"The page is at {address} (Ctrl-C ends it)."))
    else:
        tell(f"Written to {write_report(runs, out, figures=figures)}.")
