"""Files that are there whole or not at all."""

from __future__ import annotations

import hashlib
import json
import os
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

__all__ = ["atomic_file", "digest_of", "flush", "shown", "user_path", "write_atomically"]


def user_path(text: str | Path) -> Path:
    """A path as a user writes it: `~` is the home directory, where there is one."""
    try:
        return Path(text).expanduser()
    except RuntimeError:  # no such user: a file may well be called ~like this
        return Path(text)


@contextmanager
def atomic_file(target: Path) -> Iterator[Path]:
    """A temporary path beside `target` that becomes `target` when the block succeeds, and vanishes when it fails.

    Readers, other processes that write the same file, and crashes never see a half-written one.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}.{uuid.uuid4().hex}")
    try:
        yield temporary
        flush(temporary)
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)


def digest_of(content: Mapping[str, Any]) -> str:
    """SHA-256 of what can be written as JSON, by which a change made by hand is noticed."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def shown(name: Path | str) -> str:
    """A file name that can be printed, whatever bytes it is made of."""
    return os.fsencode(name).decode("utf-8", "replace")


def write_atomically(target: Path, text: str) -> None:
    """Replace a file's content."""
    with atomic_file(target) as temporary:
        temporary.write_text(text, encoding="utf-8")


def flush(path: Path) -> None:
    """Make sure that a file's or directory's content has reached the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
