"""Kills: at random times, at random file operations, and inside writes, also of a run that is just being resumed."""

from __future__ import annotations

import random
import shutil
import time
from pathlib import Path

from torture.child import Outcome, at_operation, count_operations, cut_writes, die, run_command
from torture.subject import Subject, differences, result
from torture.tally import Tally

__all__ = ["Reference", "kill"]

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
        self.sizes = sorted({path.stat().st_size for path in self.run.rglob("*") if path.is_file()} - {0})
        self.result = result(self.run)

    def play_on(self, run: Path) -> tuple[Outcome, bool]:
        """Resume a run to its end; begin it where nothing was begun. Whether it was begun anew."""
        outcome = run_command(self.subject.resume(run))
        if "holds no run to resume" not in outcome.said:
            return outcome, False
        return run_command(self.subject.begin(run, self.method)), True


def kill(reference: Reference, kills: int, seed: int, tally: Tally) -> None:
    """Kill runs until `kills` kills have hit, and look at what each ends with."""
    draw = random.Random(f"kills {seed} {reference.method}")
    trial = hits = 0
    while hits < kills:
        trial += 1
        run = reference.subject.folder / f"killed-{trial}"
        struck: list[str] = []
        for _ in range(min(draw.randint(1, LONGEST), kills - hits)):
            kind, outcome = _strike(draw, reference, run, bool(struck))
            if not outcome.killed:
                break
            struck.append(kind)
        if outcome.killed:
            outcome, _ = reference.play_on(run)
        wrong = [outcome.said[-2000:]] if outcome.code else differences(run, reference.result)
        hits += len(struck)
        for kind in struck:
            tally.add(f"{reference.method}: killed {kind}", "identical" if not wrong else "broken")
        if wrong:
            tally.broken(f"{reference.method}, seed {seed}, trial {trial} ({', '.join(struck)}): {'; '.join(wrong)}")
        shutil.rmtree(run, ignore_errors=True)


def _strike(draw: random.Random, reference: Reference, run: Path, begun: bool) -> tuple[str, Outcome]:
    """One attempt to begin or to go on that may be killed on the way."""
    subject = reference.subject
    command = subject.resume(run) if begun and (run / "config.yaml").exists() else None
    command = command or subject.begin(run, reference.method)
    kind = draw.choice(["at a time", "at a file operation", "inside a write"])
    if kind == "at a time":
        return kind, run_command(command, kill_after=draw.uniform(0, reference.seconds))
    number = draw.randint(1, reference.operations)
    size = draw.randint(0, draw.choice(reference.sizes))
    act = die if kind == "at a file operation" else cut_writes(size)
    return kind, run_command(command, at_operation(run, number, act))
