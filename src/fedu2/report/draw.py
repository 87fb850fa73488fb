"""From runs to figures: `drawings`, and `draw`, which writes them as files."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from pathlib import Path

from fedu2.errors import FedU2Error, UsageError
from fedu2.report.drawing import Drawing, save, svg
from fedu2.report.figures import ORDER, figures
from fedu2.report.style import styled
from fedu2.report.subject import as_subjects
from fedu2.run import Run

__all__ = ["Drawing", "draw", "drawings", "figures", "save", "svg"]

log = logging.getLogger("fedu2")

KINDS = (".png", ".svg")


def drawings(
    runs: Sequence[Run],
    names: Sequence[str] | None = None,
    device: str = "auto",
    labels: Sequence[str] | None = None,
) -> dict[str, Drawing]:
    """Figures of these runs together, by name, in order of interest.

    Without `names` all are drawn for which the runs hold something; a figure that was asked for and cannot be drawn is
    an error. labels: what to call the runs; by default what sets them apart.
    """
    chosen = list(dict.fromkeys(names)) if names is not None else _all()
    makers = {name: figures[name] for name in chosen}  # an unknown one explains itself before anything is computed
    subjects = as_subjects(runs, device, labels)
    drawn: dict[str, Drawing] = {}
    with styled():
        for name, make in makers.items():
            try:
                drawing = make(subjects)
            except FedU2Error:
                if names is not None:
                    raise
                continue  # said below, once for all figures
            if drawing is not None:
                drawn[name] = drawing
            elif names is not None:
                raise UsageError(f"there is nothing in {_listed(runs)} for the figure {name!r}")
    for subject in subjects:
        if subject.refusal is not None:
            log.warning("no representations of %s: %s", subject.label, subject.refusal)
    return drawn


def draw(runs: Sequence[Run], out: Path, names: Sequence[str] | None = None, device: str = "auto") -> list[Path]:
    """Write figures into the folder `out`, each as PNG and SVG; the files."""
    if out.exists() and not os.access(out, os.W_OK):
        raise UsageError(f"cannot write to {out}: choose another --out")
    drawn = drawings(runs, names, device)
    files = [(out / f"{name}{kind}", drawing) for name, drawing in drawn.items() for kind in KINDS]
    for path, drawing in files:
        save(drawing, path)
    return [path for path, _ in files]


def _all() -> list[str]:
    """Ours in order of interest, then the user's own."""
    return [*ORDER, *(name for name in figures if name not in ORDER)]


def _listed(runs: Sequence[Run]) -> str:
    return ", ".join(str(run.path) for run in runs)
