"""What `fuzz.guided` starts: a target whose code is imported with counters in it, and libFuzzer's loop."""

from __future__ import annotations

import sys
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["fedu2"]):
    from fuzz.worker import attempt, keep, quiet, target_named


def main(name: str, folder: str, *arguments: str) -> None:
    """Try inputs until libFuzzer has had enough."""
    with atheris.instrument_imports(include=["fedu2"]):
        target = target_named(name)
        attempt(target, target.seeds()[0])
    quiet()

    def one_input(data: bytes) -> None:
        if problem := attempt(target, data):
            keep(Path(folder), name, data, problem)

    atheris.Setup([sys.argv[0], *arguments], one_input)
    atheris.Fuzz()


if __name__ == "__main__":
    main(*sys.argv[1:])
