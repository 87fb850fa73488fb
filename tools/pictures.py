"""Draw the README's pictures: python -m tools.pictures RUNS [--seed N]

RUNS is where `fedu2 paper run` trained the cells of figures 1 and 3; those of its rows that are there are drawn, each
at its last checkpoint. What the pictures show is written down as numbers, too, in results/pictures.json, from which
`tools/publish.py` takes the words around them.

The README's show the middle of training: after the last round, with a rate that has fallen to 0, local models hardly
leave the global one. A run with `checkpoint_every=30` keeps that of round 30; in a copy of it without the later one,
round 30 is the last.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tools.gallery import keep

from fedu2 import Run
from fedu2.evaluation.collapse import effective_rank, spectrum
from fedu2.evaluation.similarity import linear_cka
from fedu2.files import write_atomically
from fedu2.paper.campaign import Campaign
from fedu2.paper.plan import FIGURE_METHODS, Cell
from fedu2.paper.records import existing, path_of
from fedu2.report.draw import drawings
from fedu2.report.snapshot import snapshot

ROOT = Path(__file__).parents[1]
FIGURES = ("spectrum", "tsne")
TOP = 100  # singular values written down


def main(arguments: Sequence[str] | None = None, root: Path = ROOT) -> None:
    """Two pictures, and their numbers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path)
    parser.add_argument("--seed", type=int, default=0, help="of the runs; default: 0")
    asked = parser.parse_args(arguments)
    begun = Campaign(asked.runs, Path()).begun(FIGURE_METHODS, asked.seed)
    written = [numbers(cell, run, _commit(cell, asked.seed, root)) for cell, run in begun.items()]
    write_atomically(root / "results" / "pictures.json", json.dumps(written, indent=1) + "\n")
    shown = drawings(list(begun.values()), FIGURES, labels=[cell.title for cell in begun])
    for name, drawing in shown.items():
        keep(drawing, root / "docs" / "pictures" / f"{name}.png")


def numbers(cell: Cell, run: Run, source: str) -> dict[str, Any]:
    """How uniform and how unified the representations are: spectra and ranks, and each local model's likeness."""
    taken = snapshot(run)
    return {
        "cell": cell.name,
        "seed": run.experiment.seed,
        "commit": source,
        "environment": run.summary["environment"],
        "round": taken.round,
        "rounds": run.experiment.rounds,
        "images": len(taken.features),
        "clients": list(taken.clients),
        "effective_rank": {
            "global": _digits(effective_rank(taken.features)),
            "local": [_digits(effective_rank(features)) for features in taken.local],
        },
        "linear_cka_to_global": [_digits(linear_cka(taken.features, features)) for features in taken.local],
        "spectrum": {
            "global": [_digits(value) for value in spectrum(taken.features)[:TOP].tolist()],
            "local": [[_digits(value) for value in spectrum(features)[:TOP].tolist()] for features in taken.local],
        },
    }


def _commit(cell: Cell, seed: int, root: Path) -> str:
    """Of the source that trained it, as its record tells."""
    record = existing(path_of(cell, seed, root / "results" / "paper"), cell)
    return str(record.content["commit"]) if record else ""


def _digits(value: float) -> float:
    return float(f"{value:.4g}")


if __name__ == "__main__":
    main()
