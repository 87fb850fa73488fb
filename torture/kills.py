"""Kills: at random times, at random file operations, and inside writes, also of a run that is just being resumed.

The seed decides on the kind and the place of every kill. What remains to the clock: what a kill "at a time" meets, the
lengths of files that hold clocks (by a few bytes), and so how many trials it takes until enough kills have hit.
"""

from __future__ import annotations

import random
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

from torture.child import Outcome, at_operation, count_operations, cut_writes, die, run_command
from torture.subject import Subject, differences, result
from torture.tally import Tally

__all__ = ["Reference", "kill", "plan"]

KINDS = ("at a time", "at a file operation", "inside a write")
LONGEST = 4  # kills of one run until it may end


class Reference:
    """An uninterrupted run: what must come out, how long it takes, how many operations on files, and their sizes."""

    def __init__(self, subject: Subject, method: str) -> None:
        self.subject, self.method = subject, method
        self.run = subject.folder / f"whole-{method}"
        began = time.monotonic()
        outcome = run_command(subject.begin(self.run, method), count_operations(self.run))
        if outcome.code:
            raise SystemExit(f"the uninterrupted run fails: {outcome.said}")
        self.seconds = time.monotonic() - began
        self.operations = outcome.said.count("\x00")
        self.sizes = [path.stat().st_size for path in sorted(self.run.rglob("*")) if path.is_file()]
        self.result = result(self.run)

    def play_on(self, run: Path) -> tuple[Outcome, bool]:
        """Resume a run to its end; begin it where nothing was begun. Whether it was begun anew."""
        outcome = run_command(self.subject.resume(run))
        if "holds no run to resume" not in outcome.said:
            return outcome, False
        return run_command(self.subject.begin(run, self.method)), True


@dataclass(frozen=True)
class Strike:
    """A kill to be: what kind, and where as shares of a run's time or operations, and of the file being written."""

    kind: str
    when: float
    file: float
    size: float


def plan(seed: int, method: str, trial: int) -> list[Strike]:
    """The kills of one trial: a function of these three alone, whatever the clock made of the trials before."""
    draw = random.Random(f"kills {seed} {method} {trial}")
    return [
        Strike(draw.choice(KINDS), draw.random(), draw.random(), draw.random()) for _ in range(draw.randint(1, LONGEST))
    ]


def kill(reference: Reference, kills: int, seed: int, tally: Tally) -> None:
    """Kill runs until `kills` kills have hit, and look at what each ends with."""
    trial = hits = 0
    while hits < kills:
        trial += 1
        run = reference.subject.folder / f"killed-{trial}"
        struck: list[str] = []
        for strike in plan(seed, reference.method, trial)[: kills - hits]:
            outcome = _strike(strike, reference, run, bool(struck))
            if not outcome.killed:
                break
            struck.append(strike.kind)
        if outcome.killed:
            outcome, _ = reference.play_on(run)
        wrong = [outcome.said[-2000:]] if outcome.code else differences(run, reference.result)
        hits += len(struck)
        for kind in struck:
            tally.add(f"{reference.method}: killed {kind}", "identical" if not wrong else "broken")
        if wrong:
            tally.broken(f"{reference.method}, seed {seed}, trial {trial} ({', '.join(struck)}): {'; '.join(wrong)}")
        shutil.rmtree(run, ignore_errors=True)


def _strike(strike: Strike, reference: Reference, run: Path, begun: bool) -> Outcome:
    """One attempt to begin or to go on that may be killed on the way."""
    subject = reference.subject
    command = subject.resume(run) if begun and (run / "config.yaml").exists() else None
    command = command or subject.begin(run, reference.method)
    if strike.kind == "at a time":
        return run_command(command, kill_after=strike.when * reference.seconds)
    number = 1 + int(strike.when * reference.operations)
    size = int(strike.size * reference.sizes[int(strike.file * len(reference.sizes))])
    act = die if strike.kind == "at a file operation" else cut_writes(size)
    return run_command(command, at_operation(run, number, act))
