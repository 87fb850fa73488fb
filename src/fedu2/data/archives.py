"""Single files of a folder or of a .tar.gz archive, within bounds.

Archives are read in place as a stream: nothing is extracted to disk, so the names inside cannot lead anywhere, and
a small archive cannot unpack without end. Of the tar format (POSIX ustar) only headers and content are understood;
extensions (long names, sparse files) are passed over, for no file that is wanted needs them.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Collection, Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from fedu2.errors import DataError
from fedu2.files import read_bytes

__all__ = ["read_archive", "read_folder"]

BLOCK = 512  # bytes; headers have one, contents are filled up to whole ones


def read_folder(folder: Path, names: Collection[str], max_file: int) -> Iterator[tuple[str, bytes]]:
    """(name, content) of those files of `folder` that are in `names`."""
    for path in (folder / name for name in names):
        try:
            if not path.is_file():
                continue
            yield path.name, read_bytes(path, max_file)
        except OSError as error:
            raise DataError(f"{path} cannot be read ({error})") from error


def read_archive(
    archive: Path, folder: str, names: Collection[str], max_file: int, max_total: int
) -> Iterator[tuple[str, bytes]]:
    """(name, content) of those members `folder/name` of the archive whose name is in `names`, in its own order."""
    wanted = {f"{folder}/{name}": name for name in names}
    try:
        with gzip.open(archive) as unzipped:
            stream = _Bounded(unzipped, max_total)
            while (member := _next_member(stream)) is not None:
                if not member.regular or member.name not in wanted:
                    stream.skip(member.blocks)
                elif member.size > max_file:
                    raise ValueError(f"its member {member.name} is larger than the {max_file:,} bytes expected at most")
                else:
                    yield wanted[member.name], stream.exactly(member.blocks)[: member.size]
            while stream.read(1 << 20):  # to the end, where the checksum of the archive stands
                pass
    except (OSError, EOFError, ValueError, zlib.error) as error:
        raise DataError(f"{archive} is damaged or cannot be read: {error}") from error


class _Member(NamedTuple):
    """What a header says; blocks: bytes that its content takes in the stream."""

    name: str
    size: int
    regular: bool

    @property
    def blocks(self) -> int:
        return -(-self.size // BLOCK) * BLOCK


def _next_member(stream: _Bounded) -> _Member | None:
    """The next header, checked; None at the end, which is a block of zeros or that of the stream."""
    header = stream.read(BLOCK)
    if not header.strip(b"\0"):
        return None
    if len(header) < BLOCK or _number(header[148:156]) != sum(header[:148]) + 8 * ord(" ") + sum(header[156:]):
        raise ValueError("it is no tar archive, or ends too early")
    name, prefix = (_text(field) for field in (header[:100], header[345:500]))
    if prefix and header[257:263] == b"ustar\0":  # GNU's own format keeps other things there
        name = f"{prefix}/{name}"
    if name.startswith("/") or ".." in PurePosixPath(name).parts:
        raise ValueError(f"its member {name!r} leads out of the archive")
    return _Member(name, _number(header[124:136]), regular=header[156:157] in (b"0", b"\0"))


def _text(field: bytes) -> str:
    return field.partition(b"\0")[0].decode("utf-8", "replace")


def _number(field: bytes) -> int:
    """Octal digits or, with the first bit set, GNU's binary form."""
    if field[0] == 0x80:
        return int.from_bytes(field[1:], "big")
    digits = field.strip(b" \0")
    if digits.strip(b"01234567"):
        raise ValueError("it is no tar archive, or damaged")
    return int(digits or b"0", 8)


class _Bounded:
    """A stream that refuses to yield more than `limit` bytes in all."""

    def __init__(self, stream: gzip.GzipFile, limit: int) -> None:
        self.stream, self.limit, self.left = stream, limit, limit

    def read(self, size: int) -> bytes:
        """At most `size` bytes; fewer only at the end."""
        chunk = self.stream.read(size)
        self.left -= len(chunk)
        if self.left < 0:
            raise ValueError(f"it unpacks to more than the {self.limit:,} bytes expected at most")
        return chunk

    def exactly(self, size: int) -> bytes:
        """`size` bytes."""
        chunk = self.read(size)
        if len(chunk) < size:
            raise EOFError("it ends too early")
        return chunk

    def skip(self, size: int) -> None:
        """Pass over `size` bytes without holding them."""
        while size > 0:
            size -= len(self.exactly(min(size, 1 << 20)))
