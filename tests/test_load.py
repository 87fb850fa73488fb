"""Many clients and many rounds cost what few do, each: the small form of `python -m benchmarks.load`."""

from __future__ import annotations

import gc
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.load import TINY, noise_images, tables

import fedu2
from fedu2.console import _Clock
from fedu2.experiment import Experiment
from fedu2.federation.backend import EpochReport
from fedu2.federation.callbacks import Callback
from fedu2.federation.journal import Journal
from fedu2.methods import Task

TOY = {
    **TINY, "data.image_size": 8, "method": "colour", "batch_size": 4, "views.recipe": "none",
    "views.crop_scale": None, "evaluation.every": 0,
}  # fmt: skip


class _Looks(Callback):
    """Open files, objects, and bytes of the newest checkpoint, after some of the rounds."""

    def __init__(self, every: int) -> None:
        self.every, self.directory = every, Path()
        self.handles: list[int] = []
        self.objects: list[int] = []
        self.bytes: list[int] = []

    def on_start(self, experiment: Experiment, directory: Path, round_: int) -> None:
        self.directory = directory

    def on_round(self, record: Mapping[str, Any]) -> None:
        if record["round"] and record["round"] % self.every == 0:
            gc.collect()
            newest = max((self.directory / "checkpoint").glob("round-*"))
            self.handles.append(len(os.listdir("/proc/self/fd")))
            self.objects.append(len(gc.get_objects()))
            self.bytes.append(sum(path.stat().st_size for path in newest.iterdir()))


def test_a_long_run_keeps_no_file_open_and_nothing_in_memory(tmp_path: Path) -> None:
    looks, rounds = _Looks(60), 240
    settings = TOY | {"dataset": noise_images(8, 8), "clients": 2, "rounds": rounds}
    run = fedu2.train(Experiment.parse(settings), tmp_path / "run", callbacks=[looks])
    assert len(run.history) == rounds + 1
    assert max(looks.handles) <= looks.handles[0] + 1  # TensorBoard may be writing
    assert looks.objects[-1] - looks.objects[0] < 100  # 180 records would be some 700
    assert max(looks.bytes) - min(looks.bytes) < 100  # the last one knows of the best round; 180 records are 60,000
    assert (run.path / "checkpoint" / "metrics.jsonl").read_bytes() == (run.path / "metrics.jsonl").read_bytes()


def test_two_hundred_clients(tmp_path: Path) -> None:
    settings = TOY | {"dataset": noise_images(800, 8), "clients": 200, "rounds": 2}
    run = fedu2.train(Experiment.parse(settings), tmp_path / "run")
    assert run.history[-1]["clients"] == list(range(200))
    assert run.history[-1]["fedavg.weights"] == [1 / 200] * 200
    held = {path.name for path in (run.path / "checkpoint" / "round-000002").iterdir()}
    assert held == {"server.safetensors", "manifest.json"}  # clients of this method remember nothing


def test_the_clock_forgets_rounds() -> None:
    clock = _Clock(rounds=30)
    for round_ in range(1, 31):
        clock.begin_round(steps=20)
        for client in range(10):
            task = Task(round_, client, 2, 0.1, 0.0)
            for steps in (1, 2):
                clock.advance(EpochReport(task, steps, 4, {}))
    assert len(clock._client_steps) == 10
    assert clock.steps_done == 600
    assert clock.share() == 1.0


def test_a_journal_that_failed_in_between_has_no_line_twice(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "metrics.jsonl")
    first = journal.write([{"round": 0}, {"round": 1}])
    journal.commit()
    journal.write([{"round": 2}])  # whose checkpoint could not be written
    second = journal.write([{"round": 2}, {"round": 3}])
    journal.commit()
    lines = b"".join(b'{"round": %d}\n' % n for n in range(4))
    assert journal.path.read_bytes() == lines
    other = tmp_path / "other"
    assert journal.records(first, other) == b"".join(lines.splitlines(keepends=True)[:2])
    assert journal.records(second, other) == lines
    journal.path.rename(other)
    assert journal.records(second, other) == lines
    again = Journal(tmp_path / "metrics.jsonl")
    again.begin(lines)
    assert again.path.read_bytes() == lines
    assert again.write([]) == second


def test_the_tables_of_the_page_are_rendered_from_figures() -> None:
    found = {"round_cpu": 2.0, "peak_mb": 300.0, "checkpoints_mb": 1.0}
    block = {"round": 0, "cpu": 0.0, "resident_mb": 200.0, "handles": 9}
    cases = {
        "images 100000": found, "images 200000": {**found, "round_cpu": 4.1, "peak_mb": 500.0},
        "rounds": {"blocks": [block, {**block, "round": 500, "cpu": 5.0}]},
    }  # fmt: skip
    shown = tables(cases)
    assert "| images 200000 | 4.1 | 2.05 | 500 | +200 | 1.0 |" in shown
    assert "| 0 to 500 | 10.0 | 200 | 9 |" in shown
