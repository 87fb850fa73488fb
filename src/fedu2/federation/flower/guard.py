"""Runs a program until it ends or is told to, and then ends all that it has started: python -m ...guard COMMAND ...

Flower's programs start others, some of them in sessions of their own, which killing a process group would miss. The
guard adopts what they leave behind. It ends with the pipe on its standard input, so that nothing is left over however
the process at the other end ends: by an exception, by Ctrl-C, or by kill -9.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

__all__ = ["guard"]

GRACE = 5.0  # seconds from SIGTERM to SIGKILL
LINUX = sys.platform.startswith("linux")


def guard(command: Sequence[str]) -> int:
    """Run a command until it ends, or standard input does, and then end all that it has started; its exit code."""
    if LINUX:
        ctypes.CDLL(None).prctl(36, 1)  # PR_SET_CHILD_SUBREAPER: orphans below become children of this process
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    # A list of words of this program's own making, and no shell.
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=_die_with_guard)  # nosec B603
    try:
        _watch(child)
    finally:
        child.kill()
        code = child.wait()
        _end_orphans()
    return code if code >= 0 else 128 - code


def _die_with_guard() -> None:
    if LINUX:
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def _watch(child: subprocess.Popen[bytes]) -> None:
    """Until the child ends, or is told to: by the end of standard input with time for its farewells, else without."""
    while child.poll() is None:
        told, _, _ = select.select([0], [], [], 0.1)
        if told:
            if not os.read(0, 8):
                child.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.wait(GRACE)
            return


def _end_orphans() -> None:
    """Kill this process's children, and those that their death makes its children, until there are none."""
    while True:
        for pid in _children(os.getpid()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(0.02)


def _children(parent: int) -> list[int]:
    """The processes that have this parent."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            if int(stat.read_text().rpartition(")")[2].split()[1]) == parent:
                found.append(int(stat.parent.name))
    return found


if __name__ == "__main__":
    sys.exit(guard(sys.argv[1:]))
