"""Single files of a folder or of a .tar.gz archive, within bounds.

Archives are read in place as a stream: nothing is extracted to disk, so the names inside cannot lead anywhere, and
a small archive cannot unpack without end.
"""

from __future__ import annotations

import gzip
import tarfile
import zlib
from collections.abc import Collection, Iterator
from pathlib import Path

from fedu2.errors import DataError

__all__ = ["read_archive", "read_folder"]


def read_folder(folder: Path, names: Collection[str], max_file: int) -> Iterator[tuple[str, bytes]]:
    """(name, content) of those files of `folder` that are in `names`."""
    for path in (folder / name for name in names):
        try:
            if not path.is_file():
                continue
            if (size := path.stat().st_size) > max_file:
                raise DataError(f"{path} has {size:,} bytes, more than the {max_file:,} expected at most")
            yield path.name, path.read_bytes()
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
            with tarfile.open(fileobj=stream, mode="r|") as tar:  # type: ignore[call-overload]
                for member in tar:
                    if member.isreg() and member.name in wanted:
                        yield wanted[member.name], _read_member(tar, member, max_file)
            while stream.read(1 << 20):  # to the end, where the checksum of the archive stands
                pass
    except (OSError, EOFError, ValueError, zlib.error, tarfile.TarError) as error:
        raise DataError(f"{archive} is damaged or cannot be read: {error}") from error


def _read_member(tar: tarfile.TarFile, member: tarfile.TarInfo, max_file: int) -> bytes:
    if member.size > max_file:
        raise ValueError(f"its member {member.name} is larger than the {max_file:,} bytes expected at most")
    content = tar.extractfile(member)
    blob = b"" if content is None else content.read()
    if len(blob) != member.size:
        raise EOFError(f"its member {member.name} ends too early")
    return blob


class _Bounded:
    """A stream that refuses to yield more than `limit` bytes in all."""

    def __init__(self, stream: gzip.GzipFile, limit: int) -> None:
        self.stream, self.limit, self.left = stream, limit, limit

    def read(self, size: int) -> bytes:
        chunk = self.stream.read(size)
        self.left -= len(chunk)
        if self.left < 0:
            raise ValueError(f"it unpacks to more than the {self.limit:,} bytes expected at most")
        return chunk
