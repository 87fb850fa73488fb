"""`fedu2 export`, apart from parsing."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from fedu2.export.package import export
from fedu2.run import Run

__all__ = ["export_run"]


def export_run(console: Console, path: Path, out: Path | None, names: Sequence[str], best: bool, force: bool) -> None:
    """Export, and list what was written."""
    folder = export(Run(path), out, names, best=best, force=force)
    console.print(f"Written and checked: {folder}", highlight=False, markup=False, soft_wrap=True)
    for file in sorted(folder.iterdir()):
        console.print(f"  {file.name}  {file.stat().st_size:,} bytes", highlight=False, markup=False)
    console.print("README.md says how to use it.", highlight=False)
