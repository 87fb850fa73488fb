"""Files of a run directory that somebody else may have written, and the page that is made of them."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from fedu2.errors import FedU2Error
from fedu2.evaluate import kept
from fedu2.experiment import Experiment
from fedu2.report.content import read_sheets
from fedu2.report.page import page
from fedu2.run import Run
from fedu2.rundir import RunDirectory
from fuzz.mutate import mutate_json, mutate_text

__all__ = ["mutate", "one_input", "seeds"]

LINE = b"\n-- 8< --\n"
NAMES = ("metrics.jsonl", "summary.json", "evaluation.json", "partition.json", "images.blake2b", "config.yaml")


def seeds() -> list[bytes]:
    """A run of two rounds, judged once."""
    lines = [
        {"round": round_, "loss": 1.5, "knn": 20.0, "seconds": 2.0, "samples_per_second": 100.0, "clients": [0, 1],
         "eua.weights": [0.5, 0.5]} for round_ in range(3)
    ]  # fmt: skip
    entry = {"protocol": "knn", "encoder": "last", "round": 2, "data": "sample", "seeds": 1, "options": {},
             "mean": 20.0, "deviation": 0.0, "values": [20.0]}  # fmt: skip
    config = Experiment.parse({"rounds": 2, "clients": 2}).model_dump(mode="json")
    contents = [
        b"\n".join(json.dumps(line).encode() for line in lines),
        json.dumps({"rounds": 2, "knn": 20.0, "environment": {"torch": "2"}}).encode(),
        json.dumps([entry]).encode(),
        b'{"clients": [[0, 1], [2, 3]]}',
        b"0123456789abcdef\n",
        json.dumps(config).encode(),
    ]
    return [LINE.join(contents), LINE.join([contents[0], *[b""] * 4, contents[5]])]


def mutate(data: bytes, seeds: Sequence[bytes], chance: random.Random) -> bytes:
    """One of the files, or one of the lines, is spoiled."""
    parts = data.split(LINE)
    which = chance.choice((0, 0, *range(len(parts))))
    lines = parts[which].split(b"\n") if which == 0 else [parts[which]]
    at = chance.randrange(len(lines))
    lines[at] = chance.choice((mutate_json, mutate_json, mutate_text))(lines[at], seeds, chance)
    parts[which] = b"\n".join(lines)
    return LINE.join(parts)


def one_input(data: bytes) -> None:
    """Everything that is read without the model: each file may be damaged by itself."""
    with TemporaryDirectory() as folder:
        path = Path(folder)
        for name, content in zip(NAMES, data.split(LINE), strict=False):
            if content:
                (path / name).write_bytes(content)
        run = Run(path)
        experiment = run.experiment
        sheets = read_sheets([path])
        page(sheets)
        RunDirectory(path).partition(4, list)
        _each(lambda: kept(run), lambda: run.finished, lambda: RunDirectory(path).check_images(experiment, "0"))


def _each(*readings: Callable[[], object]) -> None:
    for reading in readings:
        with suppress(FedU2Error):
            reading()
