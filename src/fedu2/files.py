"""Files that are there whole or not at all, and those of others: read within bounds, named without harm."""

from __future__ import annotations

import errno
import hashlib
import io
import json
import os
import re
import stat
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

__all__ = [
    "atomic_file",
    "digest_of",
    "flush",
    "lock_file",
    "naming",
    "opened",
    "parse_json",
    "read_bytes",
    "read_json",
    "read_text",
    "read_within",
    "seal",
    "shown",
    "unseal",
    "user_path",
    "write_atomically",
]

SEAL = "# sha256 of what follows: "
SURROGATES = re.compile("[\ud800-\udfff]")
LONGEST = 1 << 26  # bytes of a file that is read at once; a partition of eight million images has as many


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
    return parse_json(read_text(path))


def read_text(path: Path, longest: int = LONGEST, errors: str = "strict") -> str:
    """What `read_bytes` reads, as text."""
    return read_bytes(path, longest).decode("utf-8", errors)


def read_bytes(path: Path, longest: int = LONGEST) -> bytes:
    """A file that others may have written: OSError where it is no regular file, or too long."""
    with opened(path) as file:
        return read_within(file, longest)


def read_within(file: IO[bytes], longest: int = LONGEST) -> bytes:
    """All that is left of a file, be it a pipe; OSError where that is more than `longest` bytes."""
    content = file.read(longest + 1)
    if len(content) > longest:
        raise OSError(errno.EFBIG, f"it has more than {longest:,} bytes")
    return content


@contextmanager
def opened(path: Path) -> Iterator[io.BufferedReader]:
    """A regular file to read; OSError where it is none, for a pipe may never begin, and a device never end."""
    with naming(path), open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.EINVAL, "it is no regular file")
        yield file


def lock_file(path: Path) -> IO[bytes]:
    """A file to lock, made where there is none; a link in its place might lead to a file of somebody else's."""
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
    return open(os.open(path, flags, 0o666), "r+b", buffering=0)


def shown(name: Path | str) -> str:
    """A name that can be printed, whatever it is made of: nothing in it ends a line, or tells a terminal what to do."""
    text = SURROGATES.sub("\ufffd", str(name))  # bytes that are no text
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text)


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
