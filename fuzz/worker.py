"""Inputs one after another, in a process of their own: it may hang, run out of memory or die.

Input number i is made from the seed and i alone, so that it can be made again when this process could not tell of it.
"""

from __future__ import annotations

import hashlib
import importlib
import logging
import os
import pkgutil
import random
import resource
import signal
import sys
import time
import traceback
import warnings
from contextlib import suppress
from pathlib import Path
from types import FrameType, ModuleType
from typing import NoReturn

from fedu2.errors import FedU2Error
from fuzz import targets
from fuzz.mutate import mutate_bytes

__all__ = ["MEMORY", "SECONDS", "Hang", "attempt", "corpus", "input_at", "known", "limit_memory", "target_named"]

SECONDS = 5.0  # of computing for one input; other processes do not count
MEMORY = 1 << 30  # bytes for one input, beyond what the process has when it begins


class Hang(BaseException):
    """An input takes too long; not an Exception, for those are caught by the code that is tried."""


def known() -> list[str]:
    """The names of all targets."""
    return sorted(module.name for module in pkgutil.iter_modules(targets.__path__))


def target_named(name: str) -> ModuleType:
    """The module of a target."""
    return importlib.import_module(f"fuzz.targets.{name}")


def corpus(target: ModuleType) -> tuple[list[bytes], list[bytes]]:
    """What is mutated, and what is tried as it is: the same, and what is hostile on purpose."""
    seeds: list[bytes] = target.seeds()
    return seeds, [*seeds, *(target.hostile() if hasattr(target, "hostile") else [])]


def input_at(target: ModuleType, known: tuple[list[bytes], list[bytes]], seed: int, index: int) -> bytes:
    """Input number `index`, of what is in `corpus`."""
    seeds, given = known
    if index < len(given):
        return given[index]
    chance = random.Random(f"{seed}/{target.__name__}/{index}")
    mutated: bytes = getattr(target, "mutate", mutate_bytes)(chance.choice(seeds), seeds, chance)
    return mutated


def attempt(target: ModuleType, data: bytes) -> str | None:
    """What is wrong with the way in which the target took this input; None if nothing is."""
    before = _resident("VmRSS", anew=True)
    signal.signal(signal.SIGPROF, _too_long)
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    try:
        with suppress(FedU2Error):
            target.one_input(data)
    except (Exception, Hang):
        return traceback.format_exc()
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    taken = _resident("VmHWM") - before
    return f"it took {taken >> 20:,} MB of memory" if taken > MEMORY else None


def _resident(which: str, anew: bool = False) -> int:
    """Bytes in memory now (VmRSS), or at most (VmHWM) since that was last asked for `anew`."""
    if anew:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return int(status.partition(f"{which}:")[2].split()[0]) << 10


def _too_long(number: int, frame: FrameType | None) -> NoReturn:
    raise Hang(f"more than {SECONDS:g} s")


def limit_memory() -> None:
    """A hard end, at which this process dies before the machine does: some reserve what they never use."""
    size = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (size + 4 * MEMORY, size + 4 * MEMORY))


def quiet() -> None:
    """Warnings are for people."""
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")


def main(name: str, seed: str, first: str, inputs: str, until: str, folder: str, state: str) -> None:
    """Try inputs `first` … `inputs` − 1 until the clock says `until`; `state` tells the parent where we are."""
    quiet()
    target = target_named(name)
    inputs_known = corpus(target)
    attempt(target, inputs_known[0][0])  # imports what is imported late, before memory is limited
    limit_memory()
    with Path(state).open("r+b", buffering=0) as told:
        for index in range(int(first), int(inputs)):
            os.pwrite(told.fileno(), index.to_bytes(8, "little"), 0)
            if time.time() > float(until):
                break
            data = input_at(target, inputs_known, int(seed), index)
            if problem := attempt(target, data):
                keep(Path(folder), name, data, problem)
        else:
            os.pwrite(told.fileno(), int(inputs).to_bytes(8, "little"), 0)


def keep(folder: Path, name: str, data: bytes, problem: str) -> None:
    """Write an input that was not taken well, and why; one for every place in the code where it went wrong."""
    lines = [line for line in problem.splitlines() if line.strip().startswith("File ")]
    place = "".join(lines[-3:]) + problem.strip().splitlines()[-1].partition(":")[0]
    path = folder / f"{name}-{hashlib.sha256(place.encode()).hexdigest()[:10]}"
    if not path.exists():
        path.write_bytes(data)
        path.with_suffix(".txt").write_text(problem, encoding="utf-8", errors="replace")


if __name__ == "__main__":
    from fuzz import worker

    worker.main(*sys.argv[1:])  # of the module that targets see, not of its double
