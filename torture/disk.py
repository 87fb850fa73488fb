"""A disk that is full, and directories that are read-only: both real, by means that bind root as well."""

from __future__ import annotations

import ctypes
import json
import os
import random
import resource
import shutil
import signal
import struct
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from torture.child import Fate, Outcome, at_operation, run_command
from torture.kills import Reference
from torture.subject import differences
from torture.tally import Tally

__all__ = ["fill_disk", "read_only"]

NEW_NAMESPACE, NEW_USER, PRIVATE, REMOUNT = 0x00020000, 0x10000000, 1 << 18 | 1 << 14, 1 << 5
libc = ctypes.CDLL(None, use_errno=True)


def fill_disk(reference: Reference, times: int, seed: int, tally: Tally) -> None:
    """Train on disks that are too small, give them room, and resume.

    The disk is a tmpfs in a mount namespace of its own; where that is not allowed, a limit on the size of files.
    """
    draw = random.Random(f"disk {seed} {reference.method}")
    need = sum(path.stat().st_size for path in reference.run.rglob("*") if path.is_file())
    disk = reference.subject.folder / "disk"
    disk.mkdir(exist_ok=True)
    for _ in range(times):
        size = draw.randint(8, need // 1024)
        wrong = _in_room(lambda size=size: _on_small_disk(reference, disk, size))
        how = "disk full"
        if wrong is None:
            limit = draw.randint(1, max(reference.sizes))
            how, wrong = "file too large", _with_small_files(reference, disk, limit)
        row = f"{reference.method}: {how}, then room again"
        tally.add(row, "broken" if wrong else "identical")
        for complaint in wrong:
            tally.broken(f"{row} (size {size} KiB): {complaint}")


def _on_small_disk(reference: Reference, disk: Path, size: int) -> list[str]:
    _mount(disk, f"size={size}k")
    run = disk / "run"
    wrong = _fails_in_words(run_command(reference.subject.begin(run, reference.method)), "No space left")
    _mount(disk, "size=64m", REMOUNT)
    return wrong + _ends_well(reference, run)


def _with_small_files(reference: Reference, disk: Path, limit: int) -> list[str]:
    def fate() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # an error in place of a signal
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))

    run = disk / "run"
    shutil.rmtree(run, ignore_errors=True)
    wrong = _fails_in_words(run_command(reference.subject.begin(run, reference.method), fate), "File too large")
    return wrong + _ends_well(reference, run)


def read_only(reference: Reference, tally: Tally, times: int = 3) -> None:
    """Make each directory of a run read-only before it goes on and on the way, then writable again."""
    run = reference.subject.folder / "read-only"
    for inside in (".", "checkpoint", "checkpoint/round-000002", "tensorboard"):
        for number in (1, reference.operations // 4, reference.operations // 2)[:times]:
            shutil.rmtree(run, ignore_errors=True)
            run_command(
                reference.subject.begin(run, reference.method), at_operation(run, reference.operations // 2, _die)
            )
            place = run / inside
            if not place.is_dir():
                continue
            outcome = run_command(reference.subject.resume(run), _locks(run, place, number))
            place.chmod(0o755)
            must_fail = number == 1 and inside in (".", "checkpoint")
            wrong = _fails_in_words(outcome, str(run)) if outcome.code or must_fail else []
            wrong += _ends_well(reference, run)
            row = f"{reference.method}: {'the run' if inside == '.' else inside} read-only, then writable again"
            tally.add(row, "broken" if wrong else "identical")
            for complaint in wrong:
                tally.broken(f"{row} (from operation {number} on): {complaint}")


def _locks(run: Path, place: Path, number: int) -> Fate:
    """From an operation on `place` is read-only, for root too: it gives up its right to pass over permissions."""

    def fate() -> None:
        _obey_permissions()
        at_operation(run, number, lambda: place.chmod(0o555))()

    return fate


def _obey_permissions() -> None:
    """Drop the capabilities DAC_OVERRIDE (1) and DAC_READ_SEARCH (2), if we have them."""
    header = struct.pack("Ii", 0x20080522, 0)
    data = ctypes.create_string_buffer(24)
    _check(libc.capget(header, data))
    effective, *rest = struct.unpack("6I", data.raw)
    _check(libc.capset(header, struct.pack("6I", effective & ~0b110, *rest)))


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _fails_in_words(outcome: Outcome, words: str) -> list[str]:
    told = outcome.sentence and words in outcome.sentence and "/" in outcome.sentence
    return [] if told else [f"exit code {outcome.code}: {outcome.said[-2000:]}"]


def _ends_well(reference: Reference, run: Path) -> list[str]:
    outcome, _ = reference.play_on(run)
    return [outcome.said[-2000:]] if outcome.code else differences(run, reference.result)


def _in_room(work: Callable[[], Iterable[str]]) -> list[str] | None:
    """Do `work` in a process with mounts of its own; None where the system does not allow that."""
    answer, inner = os.pipe()
    pid = os.fork()
    if pid == 0:
        with suppress(BaseException):
            _own_mounts()
            os.write(inner, json.dumps(list(work()))[:60000].encode())
        os._exit(0)
    os.close(inner)
    with os.fdopen(answer) as file:
        said = file.read()
    os.waitpid(pid, 0)
    return json.loads(said) if said else None


def _own_mounts() -> None:
    user, group = os.getuid(), os.getgid()
    _check(libc.unshare(NEW_NAMESPACE if user == 0 else NEW_NAMESPACE | NEW_USER))
    if user != 0:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"0 {user} 1")
        Path("/proc/self/gid_map").write_text(f"0 {group} 1")
    _check(libc.mount(b"none", b"/", None, PRIVATE, None))  # what is mounted here is seen here alone


def _mount(place: Path, options: str, flags: int = 0) -> None:
    _check(libc.mount(b"tmpfs", str(place).encode(), b"tmpfs", flags, options.encode()))


def _check(status: int) -> None:
    if status:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
