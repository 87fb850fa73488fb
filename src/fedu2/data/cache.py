"""Where downloads and decoded images are kept."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["cache_directory"]


def cache_directory() -> Path:
    """`$FEDU2_CACHE`, else `$XDG_CACHE_HOME/fedu2`, else `~/.cache/fedu2`; it need not exist yet."""
    if own := os.environ.get("FEDU2_CACHE"):
        return Path(own).expanduser()
    shared = os.environ.get("XDG_CACHE_HOME")
    return (Path(shared).expanduser() if shared else Path.home() / ".cache") / "fedu2"
