"""The records of all rounds a second time, beside the checkpoints: only ever appended to.

So a checkpoint costs the same after 10,000 rounds as after one. Its manifest has a *mark*: how many bytes of the
records belong to its rounds, and their SHA-256. `metrics.jsonl` of the run begins with the same bytes, and either file
can be restored from the other.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedu2.errors import TrainingError
from fedu2.files import atomic_file, naming, opened, read_bytes

__all__ = ["LONGEST", "Journal", "as_lines"]

LONGEST = 1 << 30  # bytes of records; those of a round have about 500, and 100 more for each client
FLAGS = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW  # a link might lead to a file of somebody else's


def as_lines(records: Sequence[Mapping[str, Any]]) -> bytes:
    """Records as they are written, one a line."""
    return "".join(json.dumps(record) + "\n" for record in records).encode()


class Journal:
    """One such file. What lies behind the last mark is of a checkpoint that did not come about."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._size, self._hash = 0, hashlib.sha256()  # of what the last checkpoint knows
        self._next = self._size, self._hash

    def write(self, records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Add records, on the disk; the mark for a checkpoint, which then says `commit`."""
        lines = as_lines(records)
        with naming(self.path), os.fdopen(os.open(self.path, FLAGS, 0o666), "r+b") as file:
            file.truncate(self._size)
            file.seek(self._size)
            file.write(lines)
            file.flush()
            os.fsync(file.fileno())
        grown = self._hash.copy()
        grown.update(lines)
        self._next = self._size + len(lines), grown
        return {"bytes": self._next[0], "sha256": grown.hexdigest()}

    def commit(self) -> None:
        """The checkpoint with the last mark is there."""
        self._size, self._hash = self._next

    def begin(self, text: bytes) -> None:
        """Go on behind these records, of which another copy is on the disk."""
        try:
            whole = not self.path.is_symlink() and read_bytes(self.path, LONGEST).startswith(text)
        except OSError:
            whole = False
        if not whole:
            with atomic_file(self.path) as temporary:
                temporary.write_bytes(text)
        self._size, self._hash = len(text), hashlib.sha256(text)

    def sweep(self) -> None:
        """Remove what a crash in `begin` left half-written."""
        for draft in self.path.parent.glob(f".{self.path.name}.{'[0-9a-f]' * 32}"):
            draft.unlink()

    def records(self, mark: Any, spare: Path) -> bytes:
        """What belongs to a mark, from here or from another file that begins with the same bytes."""
        for path in (self.path, spare):
            try:
                with opened(path) as file:
                    text = file.read(max(0, min(mark["bytes"], LONGEST)))
                if len(text) == mark["bytes"] and hashlib.sha256(text).hexdigest() == mark["sha256"]:
                    return text
            except (OSError, KeyError, TypeError, ValueError, OverflowError):
                continue
        raise TrainingError(f"{spare} is damaged or missing, and so is {self.path}")
