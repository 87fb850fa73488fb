"""Where downloads and decoded images are kept, and how files get there whole or not at all."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["atomic_file", "cache_directory"]


def cache_directory() -> Path:
    """`$FEDU2_CACHE`, else `$XDG_CACHE_HOME/fedu2`, else `~/.cache/fedu2`; it need not exist yet."""
    if own := os.environ.get("FEDU2_CACHE"):
        return Path(own).expanduser()
    shared = os.environ.get("XDG_CACHE_HOME")
    return (Path(shared).expanduser() if shared else Path.home() / ".cache") / "fedu2"


@contextmanager
def atomic_file(target: Path) -> Iterator[Path]:
    """A temporary path beside `target` that becomes `target` when the block succeeds, and vanishes when it fails.

    Readers, and other processes that write the same file, never see a half-written one.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}.{uuid.uuid4().hex}")
    try:
        yield temporary
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)
