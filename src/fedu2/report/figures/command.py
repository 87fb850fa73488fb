"""`fedu2 figures`, apart from parsing."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from fedu2.errors import UsageError
from fedu2.report.draw import draw
from fedu2.run import Run
from fedu2.rundir import RunDirectory, refuse_link

__all__ = ["draw_figures"]


def draw_figures(
    console: Console, paths: Sequence[Path], out: Path | None, names: Sequence[str] | None, device: str
) -> None:
    """Draw, and say where the files are."""
    for path in paths:
        if not RunDirectory(path).begun():
            raise UsageError(f"{path} holds no run")
    if out is None and len(paths) == 1:
        refuse_link(paths[0] / "figures")
    out = out or (paths[0] / "figures" if len(paths) == 1 else Path("figures"))
    if out.exists() and not out.is_dir():
        raise UsageError(f"{out} is no folder: choose another --out")
    files = draw([Run(path) for path in paths], out, names or None, device)
    if not files:
        raise UsageError(f"there is nothing to draw yet in {', '.join(map(str, paths))}")
    kinds = "".join(sorted({path.suffix for path in files}))
    shown = ", ".join(dict.fromkeys(path.stem for path in files))
    console.print(
        f"{shown} ({kinds.replace('.', ' .').strip()}) → {out}", highlight=False, markup=False, soft_wrap=True
    )
