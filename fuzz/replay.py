"""One input again: python -m fuzz.replay TARGET FILE."""

from __future__ import annotations

import sys
from pathlib import Path

from fuzz.worker import attempt, limit_memory, quiet, target_named


def main(name: str, path: str) -> None:
    """Print what is wrong; exit status 1 if something is."""
    quiet()
    target = target_named(name)
    attempt(target, target.seeds()[0])
    limit_memory()
    problem = attempt(target, Path(path).read_bytes())
    print(problem or "taken well")
    sys.exit(problem is not None)


if __name__ == "__main__":
    main(*sys.argv[1:])
