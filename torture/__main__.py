"""Crash matrix: `python -m torture [--kills N] [--seed S]`; exit 1 on a broken promise.

The promise: whatever befalls a run, `fedu2 train --resume` goes on to the bit-identical result, or says in one sentence
which file is at fault, and destroys nothing.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

from torture.damage import damage
from torture.disk import fill_disk, read_only
from torture.kills import Reference, kill
from torture.second import second_process
from torture.subject import METHODS, Subject
from torture.tally import Tally

KINDS = ("kills", "damage", "full", "read-only", "second")


def main() -> int:
    """Torture runs, print a table."""
    parser = argparse.ArgumentParser(prog="python -m torture", description=__doc__.splitlines()[0])
    parser.add_argument("kinds", nargs="*", choices=[[], *KINDS], help="default: all")
    parser.add_argument("--kills", type=int, default=200, help="in all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--brief", action="store_true", help="all but the kills: a seeded sample")
    parser.add_argument("--method", action="append", choices=METHODS, help="default: all")
    asked = parser.parse_args()
    share, pairs, fills, times = (0.03, 2, 2, 1) if asked.brief else (1.0, 30, 10, 3)
    methods, kinds = asked.method or METHODS, asked.kinds or KINDS
    tally, began = Tally(), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="fedu2-torture-") as folder:
        subject = Subject(Path(folder).resolve())
        for place, method in enumerate(methods):
            reference = Reference(subject, method)
            if "kills" in kinds:
                kill(reference, len(range(place, asked.kills, len(methods))), asked.seed, tally)
            if "damage" in kinds:
                damage(reference, asked.seed, tally, share, pairs)
            if "full" in kinds:
                fill_disk(reference, fills, asked.seed, tally)
            if "read-only" in kinds:
                read_only(reference, tally, times)
            if "second" in kinds:
                second_process(reference, tally, times)
    print(tally.table())
    for complaint in tally.complaints:
        print(f"\nBROKEN {complaint}")
    print(f"\n{len(tally.complaints)} broken promises, {time.monotonic() - began:.0f} s")
    return 1 if tally.complaints else 0


if __name__ == "__main__":
    sys.exit(main())
