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
from fedu2.files import naming

__all__ = ["Journal", "as_lines"]


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
        with naming(self.path), os.fdopen(os.open(self.path, os.O_RDWR | os.O_CREAT, 0o666), "r+b") as file:
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
        if not self.path.exists() or not self.path.read_bytes().startswith(text):
            with naming(self.path):
                self.path.write_bytes(text)
        self._size, self._hash = len(text), hashlib.sha256(text)

    def records(self, mark: Any, spare: Path) -> bytes:
        """What belongs to a mark, from here or from another file that begins with the same bytes."""
        for path in (self.path, spare):
            try:
                with path.open("rb") as file:
                    text = file.read(mark["bytes"])
                if len(text) == mark["bytes"] and hashlib.sha256(text).hexdigest() == mark["sha256"]:
                    return text
            except (OSError, KeyError, TypeError, ValueError, OverflowError):
                continue
        raise TrainingError(f"{spare} is damaged or missing, and so is {self.path}")
