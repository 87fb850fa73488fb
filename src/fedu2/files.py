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

__all__ = [
    "atomic_file",
    "digest_of",
    "flush",
    "naming",
    "parse_json",
    "read_json",
    "seal",
    "shown",
    "unseal",
    "user_path",
    "write_atomically",
]

SEAL = "# sha256 of what follows: "


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
        with naming(target):
            yield temporary
            flush(temporary)
            temporary.replace(target)
            flush(target.parent)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """An error of the system names the file, also where a full disk does not."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


def seal(text: str) -> str:
    """The text below a comment with its SHA-256, by which damage is noticed that no parser would notice."""
    return f"{SEAL}{hashlib.sha256(text.encode()).hexdigest()}\n{text}"


def unseal(text: str) -> str:
    """What `seal` was given, or a text that was never sealed; ValueError where it is not as it was."""
    head = text[: len(SEAL)]
    if head[:8] != SEAL[:8] and head[8:] != SEAL[8:]:  # damage to one half of it is damage
        return text
    content = text.partition("\n")[2]
    if seal(content) != text:
        raise ValueError("its checksum does not match")
    return content


def digest_of(content: Mapping[str, Any]) -> str:
    """SHA-256 of what can be written as JSON, by which a change made by hand is noticed."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def parse_json(text: str) -> Any:
    """What JSON says; ValueError where it is none, in whatever way."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def read_json(path: Path) -> Any:
    """What a JSON file holds; OSError where it cannot be read, ValueError where it holds none."""
    return parse_json(path.read_text(encoding="utf-8"))


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
