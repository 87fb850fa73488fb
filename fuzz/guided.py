"""Inputs led by coverage: atheris mutates what reached new code, as long as it reaches new code."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from fuzz.worker import MEMORY, SECONDS, target_named

__all__ = ["drive"]

RUNS = re.compile(r"stat::number_of_executed_units: (\d+)|Done (\d+) runs|^#(\d+)\t", re.MULTILINE)


def drive(name: str, seed: int, inputs: int, until: float, folder: Path) -> int:
    """Let libFuzzer try `inputs` inputs in a process of its own; returns how many it tried."""
    if importlib.util.find_spec("atheris") is None:
        sys.exit("--guided needs atheris: pip install 'fedu2[fuzz]'")
    with tempfile.TemporaryDirectory() as corpus:
        for number, data in enumerate(target_named(name).seeds()):
            Path(corpus, f"seed-{number}").write_bytes(data)
        flags = {
            "runs": inputs, "seed": seed + 1, "timeout": 4 * int(SECONDS), "max_len": 1 << 16,
            "rss_limit_mb": 2 * MEMORY >> 20, "print_final_stats": 1, "artifact_prefix": f"{folder}/{name}-guided-",
        }  # fmt: skip
        command = [sys.executable, "-m", "fuzz.coverage", name, str(folder), corpus]
        command += [f"-{flag}={value}" for flag, value in flags.items()]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        told = subprocess.run(command, capture_output=True, text=True, errors="replace", env=environment, check=False)
    if told.returncode:
        (folder / f"{name}-guided.txt").write_text(told.stderr[-20_000:], encoding="utf-8")
    return max((int(number) for found in RUNS.findall(told.stderr) for number in found if number), default=0)
