"""The run that is tortured: minute, with checkpoints every round, a memory in every client and a best round.

Everything is imported before the first fork, so that a child starts in milliseconds. The parent never computes: it
has one thread, and a forked child of a process with more would be a gamble.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported

import numpy as np
import tensorboard.summary.writer.record_writer  # noqa: F401
import torch
import torch._dynamo
from PIL import Image

import fedu2.commands
import fedu2.evaluate  # noqa: F401

__all__ = ["METHODS", "Subject", "differences", "result"]

METHODS = {"fedema": (), "fedu2": ("byol.target=shared",)}  # clients that remember, and those that do not
CLOCKS = ("seconds", "samples_per_second", "evaluation_seconds", "environment")
SETTINGS = {
    "dataset": "folder",
    "data.layout": "images",
    "data.image_size": 8,
    "data.holdout": 0.3,
    "clients": 3,
    "partition": "iid",
    "encoder": "tiny",
    "width": 2,
    "rounds": 4,
    "local_steps": 2,
    "batch_size": 8,
    "evaluation.every": 1,
    "optimizer.lr": 0.05,
    "server.momentum": 0.5,
    "engine.threads": 1,
}


class Subject:
    """Where things are, and what to type."""

    def __init__(self, folder: Path) -> None:
        torch.set_num_threads(1)
        os.environ["FEDU2_CACHE"] = str(folder / "cache")
        self.folder = folder
        self.images = folder / "images"
        draw = np.random.default_rng(0)
        for number in range(90):
            place = self.images / f"class-{number % 3}"
            place.mkdir(parents=True, exist_ok=True)
            Image.fromarray(draw.integers(0, 256, (8, 8, 3), dtype=np.uint8)).save(place / f"{number:02d}.png")

    def begin(self, run: Path, method: str) -> list[str]:
        """The command that begins the run."""
        settings = [f"{key}={value}" for key, value in SETTINGS.items()]
        return ["train", "--out", str(run), f"method={method}", *METHODS[method], f"data.root={self.images}", *settings]

    def resume(self, run: Path) -> list[str]:
        """The command that goes on with it."""
        return ["train", "--resume", "--out", str(run)]


def result(run: Path) -> dict[str, str]:
    """All that a finished run says, without its clocks: name → SHA-256 or text."""
    newest = max((run / "checkpoint").glob("round-*"))
    manifest = json.loads((newest / "manifest.json").read_text())
    found = {f"checkpoint/{path.name}": _digest(path) for path in sorted(newest.glob("*.safetensors"))}
    found["checkpoint/manifest.json"] = f"{newest.name} {manifest['round']} {manifest['best']}"
    found |= {name: _digest(run / name) for name in ("config.yaml", "partition.json", "images.blake2b")}
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    found["metrics.jsonl"] = json.dumps([_timeless(record) for record in records])
    found["summary.json"] = json.dumps(_timeless(json.loads((run / "summary.json").read_text())))
    drafts = [str(path.relative_to(run)) for path in run.rglob(".*") if not path.name.endswith(".lock")]
    found["left behind"] = " ".join(drafts)
    return found


def differences(run: Path, expected: Mapping[str, str]) -> list[str]:
    """What of a finished run is not as expected."""
    try:
        found = result(run)
    except (OSError, ValueError, KeyError) as error:
        return [f"unreadable: {error!r}"]
    return sorted(name for name in {*found, *expected} if found.get(name) != expected.get(name))


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _timeless(record: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in record.items() if name not in CLOCKS}
