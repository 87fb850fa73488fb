"""Two processes on one run: the second is refused while the first is in the midst, and the first is not disturbed."""

from __future__ import annotations

import os
import shutil
import signal
import time
from pathlib import Path

from torture.child import Child, at_operation, run_command, start, wait
from torture.kills import Reference
from torture.subject import differences
from torture.tally import Tally

__all__ = ["second_process"]


def second_process(reference: Reference, tally: Tally, times: int = 3) -> None:
    """Stop a run at several operations, let others try, and let it go on."""
    run = reference.subject.folder / "shared"
    row = f"{reference.method}: second process on a run"
    for part in (0.5, 0.1, 0.9)[:times]:
        shutil.rmtree(run, ignore_errors=True)
        first = start(
            reference.subject.begin(run, reference.method),
            at_operation(run, max(2, int(part * reference.operations)), _pause),
        )
        _until_paused(first)
        others = [run_command(command) for command in _attempts(reference, run)]
        os.kill(first.pid, signal.SIGCONT)
        outcome = wait(first)
        wrong = [o.said[-2000:] for o in others if o.code != 2 or "in use by another process" not in o.sentence]
        wrong += [outcome.said[-2000:]] if outcome.code else differences(run, reference.result)
        tally.add(row, "broken" if wrong else "identical")
        for complaint in wrong:
            tally.broken(f"{row} at {part:.0%}: {complaint}")


def _attempts(reference: Reference, run: Path) -> list[list[str]]:
    begin = reference.subject.begin(run, reference.method)
    return [begin, reference.subject.resume(run)] if (run / "config.yaml").exists() else [begin]


def _pause() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def _until_paused(child: Child) -> None:
    until = time.monotonic() + 60
    while _state(child.pid) not in "TZ" and time.monotonic() < until:
        time.sleep(0.01)


def _state(pid: int) -> str:
    """R, S, T (stopped), Z (ended), ..."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
