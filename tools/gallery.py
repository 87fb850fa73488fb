"""Make the pictures of docs/figures.md anew: python tools/gallery.py [RUNS]; trains under RUNS what is not there."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from PIL import Image

import fedu2
from fedu2.report.draw import drawings, save
from fedu2.report.drawing import Drawing

PICTURES = Path(__file__).parents[1] / "docs" / "figures"
SETTINGS = {  # as docs/figures.md states them
    "fedu2": ["method=fedu2", "evaluation.every=1"],
    "fedbyol": ["method=fedbyol", "evaluation.every=1"],
    "devices": [
        "method=fedu2",
        "clients=100",
        "participation=0.3",
        "split.min_size=2",
        "rounds=6",
        "evaluation.every=1",
    ],
}


def main(root: str = "runs") -> None:
    """Two runs side by side, and those figures that look different with many clients."""
    runs = {name: _run(Path(root) / name, settings) for name, settings in SETTINGS.items()}
    for name, drawing in drawings([runs["fedu2"], runs["fedbyol"]]).items():
        keep(drawing, PICTURES / f"{name}.png")
    for name, drawing in drawings([runs["devices"]], ["eua", "partition"]).items():
        keep(drawing, PICTURES / f"{name}-100.png")


def _run(path: Path, settings: list[str]) -> fedu2.Run:
    if (path / "summary.json").exists():
        return fedu2.Run(path)
    return fedu2.train(fedu2.Experiment.parse({}, settings), path, resume=(path / "config.yaml").exists())


def keep(drawing: Drawing, target: Path) -> None:
    """A small file: fewer pixels than `fedu2 figures` writes, and 256 colours."""
    with tempfile.TemporaryDirectory() as folder:
        large = Path(folder) / "figure.png"
        save(drawing, large, dpi=130)
        with Image.open(large) as picture:
            small = picture.convert("RGB").quantize(256, dither=Image.Dither.NONE)
    target.parent.mkdir(parents=True, exist_ok=True)
    small.save(target, optimize=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
