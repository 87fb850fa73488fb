"""Running cells: as many as there is time for, each from where it stopped, and a record after every step."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from fedu2.engine import choose, choose_device
from fedu2.errors import UsageError, did_you_mean
from fedu2.evaluate import assess, kept
from fedu2.evaluation.judge import protocols
from fedu2.evaluation.options import Protocols
from fedu2.experiment import Experiment
from fedu2.federation.callbacks import Callback
from fedu2.federation.deadline import Deadline
from fedu2.files import lock_file
from fedu2.paper.plan import Cell
from fedu2.paper.records import FREE, Record, check_cell, existing, papers_own, path_of, write
from fedu2.run import Run, environment, train

__all__ = ["Campaign", "choose_cells"]

log = logging.getLogger("fedu2")

SHARES = [f"{100 * fraction:g} %" for fraction in Protocols().finetune.fractions]
# The scores that each protocol comes to.
SCORES: dict[str, set[str]] = {
    "knn": {"knn"},
    "linear": {"linear"},
    "finetune": {f"finetune {share}" for share in SHARES},
    "supervised": {f"supervised {share}" for share in SHARES},
}
# After other work a protocol is begun only if this share of the time limit is left; the next slice begins with it.
ENOUGH = 0.3


def choose_cells(cells: Sequence[Cell], patterns: Sequence[str]) -> list[Cell]:
    """The cells whose name, setting or row fits one of the patterns (`*` stands for anything); all without patterns."""
    if not patterns:
        return list(cells)
    chosen: list[Cell] = []
    for pattern in patterns:
        fitting = [c for c in cells if any(fnmatch(name, pattern) for name in (c.name, c.setting, c.row))]
        if not fitting:
            known = sorted({name for c in cells for name in (c.name, c.setting, c.row)})
            raise UsageError(f"no cell fits {pattern!r}: `fedu2 paper list` shows them{did_you_mean(pattern, known)}")
        chosen += fitting
    return list(dict.fromkeys(chosen))


@dataclass(frozen=True)
class Campaign:
    """Where runs and records go, and how cells are run."""

    runs: Path
    results: Path
    settings: Sequence[str] = ()  # KEY=VALUE of what does not change a result, such as data.root
    protocols: Sequence[str] = ("knn", "linear", "finetune")
    protocol_seeds: int = 3
    commit: str = ""

    def __post_init__(self) -> None:
        for setting in self.settings:
            key = setting.partition("=")[0]
            if not key.startswith(FREE) or key == "seed":
                raise UsageError(f"{setting} would change the result: a cell of the paper is a fixed configuration")
        for name in self.protocols:
            protocols[name]  # an unknown one explains itself before anything is trained

    def play(
        self,
        cells: Sequence[Cell],
        seeds: Sequence[int],
        deadline: Deadline,
        watch: Callable[[Cell, int], Sequence[Callback]],
    ) -> Iterator[Record]:
        """Run the cells one after another, until time is up.

        Records that are complete are left alone. Cells that another process is at are passed over, and looked at once
        more in the end.
        """
        self._check_places()
        worked, todo = False, [(seed, cell) for seed in seeds for cell in cells]
        for last in (False, True):
            passed: list[tuple[int, Cell]] = []
            for seed, cell in todo:
                record = self._completed(cell, seed)
                if record is None:
                    if worked and deadline.left <= 0:
                        return
                    with self._claim(cell, seed) as ours:
                        if not ours:
                            passed.append((seed, cell))
                            if last:
                                log.info("%s, seed %d: another process is at it", cell.name, seed)
                            continue
                        # Another process may have finished it just before.
                        record = self._completed(cell, seed) or self._advance(cell, seed, deadline, watch(cell, seed))
                    worked = True
                yield record
                if not self.complete(record):
                    return
            todo = passed

    def existing(self, cell: Cell, seed: int) -> Record | None:
        """The record of a cell, if there is one."""
        return existing(path_of(cell, seed, self.results), cell)

    def _completed(self, cell: Cell, seed: int) -> Record | None:
        record = self.existing(cell, seed)
        return record if record is not None and self.complete(record) else None

    def run_of(self, cell: Cell, seed: int) -> Run:
        """The directory in which a cell is trained."""
        return Run(self.runs / cell.setting / cell.row / f"seed-{seed}")

    def begun(self, cells: Sequence[Cell], seed: int) -> dict[Cell, Run]:
        """The runs that are there, each checked to be its cell's; at least one."""
        runs = {cell: run for cell in cells if (run := self.run_of(cell, seed)).path.exists()}
        if not runs:
            wanted = ", ".join(cell.name for cell in cells)
            raise UsageError(
                f"{self.runs} has no runs of {wanted}, seed {seed}: train them with fedu2 paper run EXHIBIT"
            )
        for cell, run in runs.items():
            check_cell(cell, run.experiment)
        return runs

    @contextlib.contextmanager
    def _claim(self, cell: Cell, seed: int) -> Iterator[bool]:
        """Whether this process may work at a cell: one that does keeps others out until it is done, or dead."""
        run = self.run_of(cell, seed).path
        run.parent.mkdir(parents=True, exist_ok=True)
        with lock_file(run.with_name(f".{run.name}.lock")) as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
            else:
                yield True

    def _advance(self, cell: Cell, seed: int, deadline: Deadline, watch: Sequence[Callback]) -> Record:
        """Train, then judge, as far as time allows; the record is written after every step."""
        run = self.run_of(cell, seed)
        experiment = self._experiment(cell, seed)
        worked = not self._trained(run)
        if worked:
            begun = (run.path / "config.yaml").exists()
            known = self.existing(cell, seed)
            if not begun and known is not None and known.finished:
                lacking = ", ".join(self._missing(known.content["evaluation"], experiment))
                log.info("%s, seed %d: its record lacks %s, its run is gone: trained anew", cell.name, seed, lacking)
            limit = None if deadline.seconds is None else deadline.left
            run = train(experiment, run.path, resume=begun, callbacks=watch, time_limit=limit)
        record = self._write(cell, run)

        def hurry() -> bool:
            return deadline.seconds is not None and deadline.left < ENOUGH * deadline.seconds

        if run.finished and not (worked and hurry()):
            done = self._judged(kept(run), run.experiment.dataset, run.experiment.rounds)
            if missing := self._missing(kept(run), run.experiment):
                seeds, device = self.protocol_seeds, experiment.device
                assess(run, missing, seeds=seeds, device=device, skip=done, enough=hurry)
                record = self._write(cell, run)
        return record

    def _experiment(self, cell: Cell, seed: int) -> Experiment:
        return Experiment.parse(cell.experiment(seed).flat(), self.settings)

    def _trained(self, run: Run) -> bool:
        return (run.path / "config.yaml").exists() and run.finished

    def _write(self, cell: Cell, run: Run) -> Record:
        experiment = run.experiment
        engine = choose(experiment, choose_device(experiment.device))
        path = path_of(cell, experiment.seed, self.results)
        return write(path, cell, Run(run.path), self.commit, environment(engine))  # a fresh Run: it reads only once

    def complete(self, record: Record) -> bool:
        """Trained to the end, and judged by all protocols."""
        done = self._judged(record.content["evaluation"], record.content["experiment"]["dataset"], record.rounds)
        return record.finished and all(SCORES[name] <= done for name in self.protocols)

    def _missing(self, entries: Sequence[Mapping[str, Any]], experiment: Experiment) -> list[str]:
        """The protocols by which the last encoder of a finished run is still to be judged."""
        done = self._judged(entries, experiment.dataset, experiment.rounds)
        return [name for name in self.protocols if not SCORES[name] <= done]

    def _judged(self, entries: Sequence[Mapping[str, Any]], dataset: str, round_: int) -> set[str]:
        """The scores that there are, as tables want them and with at least as many seeds as asked for."""
        wanted = set().union(*SCORES.values())
        found = {score: papers_own(entries, score, dataset, round_) for score in wanted}
        return {score for score, fit in found.items() if any(e["seeds"] >= self.protocol_seeds for e in fit)}

    def _check_places(self) -> None:
        """That records can be written is worth knowing before anything is trained."""
        for place in (self.results, self.runs):
            place.mkdir(parents=True, exist_ok=True)
            if not os.access(place, os.W_OK):
                raise UsageError(f"cannot write to {place}")
