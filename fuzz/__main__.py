"""`python -m fuzz`: all targets, a table, and exit status 1 if something was found."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from fuzz import guided
from fuzz.worker import corpus, input_at, keep, known, target_named

PATIENCE = 90.0  # seconds on the clock after which a worker hangs where no signal reaches it


@dataclass(frozen=True)
class Outcome:
    """How a target did."""

    name: str
    inputs: int
    seconds: float
    findings: int


def main() -> None:
    """Share the inputs out among the targets, and tell."""
    options = _arguments().parse_args()
    names = options.targets or known()
    folder = Path(options.out)
    folder.mkdir(parents=True, exist_ok=True)
    each = -(-options.inputs // len(names))
    each_seconds = options.seconds * options.jobs / len(names) if options.seconds else float("inf")
    drive = guided.drive if options.guided else run

    def one(name: str) -> Outcome:
        began = time.time()
        with _added_to(folder) as fresh:  # what was found before does not hide that it is found again
            inputs = drive(name, options.seed, each, began + each_seconds, fresh)
            findings = len(list(fresh.glob("*.txt")))
        outcome = Outcome(name, inputs, time.time() - began, findings)
        print(f"{name:<14}{outcome.inputs:>10,}{outcome.seconds:>10.1f}{outcome.findings:>10}", flush=True)
        return outcome

    print(f"{'target':<14}{'inputs':>10}{'seconds':>10}{'findings':>10}")
    began = time.time()
    with ThreadPoolExecutor(options.jobs) as pool:
        outcomes = list(pool.map(one, names))
    findings = sum(outcome.findings for outcome in outcomes)
    print(f"{'in all':<14}{sum(o.inputs for o in outcomes):>10,}{time.time() - began:>10.1f}{findings:>10}")
    if findings:
        print(f"see {folder}; python -m fuzz.replay TARGET FILE tries one again")
    sys.exit(findings > 0)


def run(name: str, seed: int, inputs: int, until: float, folder: Path) -> int:
    """Keep a worker going until all inputs were tried; returns how many were."""
    index = 0
    with tempfile.NamedTemporaryFile() as state:
        while index < inputs and time.time() < until:
            state.seek(0)
            state.write(index.to_bytes(8, "little"))
            state.flush()
            index, ended = _watched(name, [seed, index, inputs, until, folder, state.name], Path(state.name))
            if ended == "":
                break
            target = target_named(name)
            keep(folder, name, input_at(target, corpus(target), seed, index), f"the worker {ended} at input {index}")
            index += 1
    return index


def _watched(name: str, arguments: Sequence[object], state: Path) -> tuple[int, str]:
    """Where a worker came to, and how it ended: an empty string if well."""
    environment = os.environ | {"MALLOC_ARENA_MAX": "1", "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
    command = [sys.executable, "-m", "fuzz.worker", name, *map(str, arguments)]
    worker = subprocess.Popen(command, env=environment)
    seen, since = -1, time.monotonic()
    try:
        while worker.poll() is None:
            time.sleep(0.1)
            index = int.from_bytes(state.read_bytes()[:8], "little")
            if index != seen:
                seen, since = index, time.monotonic()
            elif time.monotonic() - since > PATIENCE:
                return index, "hangs"
    finally:
        if worker.poll() is None:
            worker.kill()
        worker.wait()
    index = int.from_bytes(state.read_bytes()[:8], "little")
    return index, "" if worker.returncode == 0 else f"died ({worker.returncode})"


@contextmanager
def _added_to(folder: Path) -> Iterator[Path]:
    """An empty folder whose files become files of `folder`, however the block ends."""
    with tempfile.TemporaryDirectory(dir=folder) as fresh:
        try:
            yield Path(fresh)
        finally:
            for path in Path(fresh).iterdir():
                path.replace(folder / path.name)


def _arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m fuzz", description="Hostile input for everything that reads.")
    parser.add_argument("--inputs", type=int, default=50_000, help="in all (default: 50,000)")
    parser.add_argument("--seconds", type=float, default=0, help="in all; default: until all inputs are tried")
    parser.add_argument("--targets", nargs="+", choices=known(), metavar="NAME", help=f"of {', '.join(known())}")
    parser.add_argument("--seed", type=int, default=0, help="another one, other inputs")
    parser.add_argument("--jobs", type=int, default=2, help="targets at the same time")
    parser.add_argument("--guided", action="store_true", help="led by coverage; needs atheris")
    parser.add_argument("--out", default="test-artifacts/fuzz", help="where inputs are kept that were not taken well")
    return parser


if __name__ == "__main__":
    main()
