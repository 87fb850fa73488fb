"""A program in the background, under a guard, with all that it writes in a file."""

from __future__ import annotations

import contextlib
import math
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from fedu2.errors import TrainingError

__all__ = ["Process"]

TAIL = 12  # lines of a log that an error tells


class Process:
    """A program with all that it starts; what they write is kept in a file. pid: the guard's, and its group's."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        self.log = log
        guarded = [sys.executable, "-P", "-m", "fedu2.federation.flower.guard", *command]
        with log.open("ab") as out:
            self.began = out.tell()
            # A list of words of this program's own making, and no shell.
            self._guard = subprocess.Popen(  # nosec B603
                guarded, env=environment, stdin=subprocess.PIPE, stdout=out, stderr=out, start_new_session=True
            )
        self.pid = self._guard.pid

    @property
    def code(self) -> int | None:
        """The program's exit code; none while it runs."""
        return self._guard.poll()

    def end(self) -> None:
        """Ask it to end, without waiting for it."""
        assert self._guard.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._guard.stdin.close()

    def kill(self) -> None:
        """End it at once, as a machine ends that loses its power."""
        assert self._guard.stdin is not None
        with contextlib.suppress(BrokenPipeError, ValueError):  # it has ended, or has been asked to
            self._guard.stdin.write(b"kill")
        self.end()
        self.wait()

    def wait(self, timeout: float | None = None) -> int | None:
        """Its exit code, once all that it started has ended too; none if that takes longer than `timeout` seconds."""
        try:
            return self._guard.wait(timeout)
        except subprocess.TimeoutExpired:
            return None

    def output(self) -> str:
        """What it has written so far, without colours."""
        with self.log.open("rb") as file:
            file.seek(self.began)
            return _plain(file.read())

    def lines(self, timeout: float | None) -> Iterator[str]:
        """What it writes, line by line, until it has ended."""
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        with self.log.open("rb") as file:
            file.seek(self.began)
            begun = b""
            while True:
                ended = self.code is not None  # asked before reading: what was written last is read as well
                *whole, begun = (begun + file.read()).split(b"\n")
                yield from map(_plain, whole)
                if ended:
                    return
                if time.monotonic() > deadline:
                    raise self.trouble(f"the run takes longer than {timeout:g} s")
                time.sleep(0.1)

    def trouble(self, what: str) -> TrainingError:
        """An error that says what became of it, and where to read more."""
        state = "does not answer" if self.code is None else f"has ended with exit code {self.code}"
        lines = [line for line in self.output().splitlines() if line.strip()][-TAIL:]
        return TrainingError("\n".join([f"{what}: {self.log.stem} {state}; the end of {self.log}:", *lines]))


def _plain(text: bytes) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", text.decode(errors="replace"))
