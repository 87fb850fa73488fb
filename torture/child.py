"""A command in a forked child, and what can befall it: a kill at a time, at a file operation, or inside a write."""

from __future__ import annotations

import os
import re
import resource
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedu2.cli import main

__all__ = ["Outcome", "at_operation", "count_operations", "cut_writes", "die", "run_command", "start", "wait"]

PATIENCE = 120.0  # seconds until a child counts as hanging
OPERATIONS = {"open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.scandir", "os.listdir", "shutil.rmtree"}

Fate = Callable[[], None]


@dataclass(frozen=True)
class Outcome:
    """How a child ended: exit code, or minus the signal; and what it printed."""

    code: int
    said: str

    @property
    def killed(self) -> bool:
        return self.code in (-signal.SIGKILL, -signal.SIGXFSZ)

    @property
    def sentence(self) -> str:
        """The error, if there is exactly one and it is in words."""
        lines = re.findall(r"^fedu2: (.+)$", self.said, re.MULTILINE)
        in_words = self.code in (1, 2) and lines and "Traceback" not in self.said
        return lines[-1] if in_words else ""


@dataclass(frozen=True)
class Child:
    """A command that is being carried out."""

    pid: int
    output: int


def run_command(arguments: Sequence[str], fate: Fate | None = None, kill_after: float | None = None) -> Outcome:
    """Carry out `fedu2 ARGUMENTS` in a child that first calls `fate`, and is killed after so many seconds."""
    return wait(start(arguments, fate), kill_after)


def start(arguments: Sequence[str], fate: Fate | None = None) -> Child:
    """Begin; `wait` must follow."""
    sys.stdout.flush()
    output, inner = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(output)
        _carry_out(arguments, fate, inner)
    os.close(inner)
    return Child(pid, output)


def wait(child: Child, kill_after: float | None = None) -> Outcome:
    """Listen to a child until its end."""
    said = bytearray()
    until = time.monotonic() + (PATIENCE if kill_after is None else kill_after)
    ears = select.poll()
    ears.register(child.output, select.POLLIN | select.POLLHUP)
    while True:
        if not ears.poll(max(0.0, until - time.monotonic()) * 1000):
            os.kill(child.pid, signal.SIGKILL)
            until += PATIENCE
            said += b"" if kill_after is not None else b"\nTraceback: the child hangs\n"
        elif not (chunk := os.read(child.output, 65536)):
            break
        else:
            said += chunk
    os.close(child.output)
    _, status = os.waitpid(child.pid, 0)
    return Outcome(os.waitstatus_to_exitcode(status), said.decode("utf-8", "replace"))


def _carry_out(arguments: Sequence[str], fate: Fate | None, output: int) -> None:
    code = 70
    try:
        os.dup2(output, 1)
        os.dup2(output, 2)
        sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w", buffering=1)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)  # Python ignores it by default; see cut_writes
        if fate is not None:
            fate()
        code = main(list(arguments))
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)


def at_operation(run: Path, number: int, act: Callable[[], None], inside: str = "") -> Fate:
    """A fate: `act` just before the child's `number`-th operation on files of the run whose names contain `inside`."""

    def fate() -> None:
        left = number

        def look(event: str, arguments: tuple[Any, ...]) -> None:
            nonlocal left
            if event in OPERATIONS and _touches(run, event, arguments) and inside in str(arguments[0]):
                left -= 1
                if left == 0:
                    act()

        sys.addaudithook(look)

    return fate


def count_operations(run: Path) -> Fate:
    """A fate that harms nobody: prints a dot for each operation, between markers."""

    def fate() -> None:
        def look(event: str, arguments: tuple[Any, ...]) -> None:
            if event in OPERATIONS and _touches(run, event, arguments):
                os.write(1, b"\x00")

        sys.addaudithook(look)

    return fate


def _touches(run: Path, event: str, arguments: tuple[Any, ...]) -> bool:
    """Whether an operation is on a file of the run; names beside a directory's descriptor come from its removal."""
    first = arguments[0] if arguments else None
    if isinstance(first, str | bytes | os.PathLike):
        named = os.fspath(first)
        named = named.decode(errors="replace") if isinstance(named, bytes) else named
        return named.startswith(str(run)) or (event in ("os.remove", "os.rmdir") and not os.path.isabs(named))
    return False


def die() -> None:
    """Kill -9, from within."""
    os.kill(os.getpid(), signal.SIGKILL)


def cut_writes(size: int) -> Callable[[], None]:
    """From now on the kernel ends the child inside the write that takes a file beyond `size` bytes."""

    def act() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))

    return act
