"""Partition files."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

from fedu2.data.partition import load_partition
from fuzz.mutate import mutate_json as mutate

__all__ = ["mutate", "one_input", "seeds"]


def seeds() -> list[bytes]:
    """In both forms."""
    return [b"[[0, 1], [2, 3, 4]]", b'{"clients": [[0], [1, 2], [9]]}']


def one_input(data: bytes) -> None:
    """For ten images."""
    with TemporaryDirectory() as folder:
        path = Path(folder, "partition.json")
        path.write_bytes(data)
        load_partition(path, 10)
