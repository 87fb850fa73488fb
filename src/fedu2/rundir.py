"""The files of one run: written atomically, read back with care, used by one process at a time."""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from torch import Tensor

from fedu2.data import load_partition, save_partition
from fedu2.errors import DataError, TrainingError, UsageError
from fedu2.experiment import Experiment
from fedu2.federation.checkpoint import experiment_in, places
from fedu2.files import naming, parse_json, read_json, seal, unseal, write_atomically
from fedu2.methods import resolve

__all__ = ["RunDirectory", "open_ended"]

log = logging.getLogger("fedu2")

FILES = (
    "config.yaml",
    "partition.json",
    "images.blake2b",
    "metrics.jsonl",
    "summary.json",
    "sites.json",
)
# What other commands make of a run, beside its training.
SHOWN = ("evaluation.json", "representations.safetensors", "figures", "report.html", "export")
# Keys that may change when a run is resumed, for they do not influence the result (or say where it ends).
FREE_KEYS = (
    "device",
    "checkpoint_every",
    "data.root",
    "data.download",
    "evaluation.",
    "engine.",
    "flower.min_",
    "flower.timeout",
    "flower.patience",
    "flower.server_data",
)


class RunDirectory:
    """A directory with one run in it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._config: Experiment | None = None  # as it was read or written, so that damage is told once

    @staticmethod
    def new_name(experiment: Experiment, root: Path = Path("runs")) -> Path:
        """A name that is not taken yet, such as runs/20260131-142501-fedu2-byol-sample."""
        stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
        name = f"{stamp}-{experiment.method}-{experiment.objective}-{experiment.dataset}"
        names = [root / name, *(root / f"{name}-{n}" for n in range(2, 1000))]
        return next(path for path in names if not path.exists())

    @staticmethod
    def newest(root: Path = Path("runs")) -> Path:
        """The run that was written to last."""
        runs = [path.parent for path in root.glob("*/config.yaml")]
        if not runs:
            raise UsageError(f"there is no run under {root} to resume; name one with --out")
        return max(runs, key=lambda run: (run / "config.yaml").stat().st_mtime)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other processes out of this run while it is being written."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            file = (self.path / ".lock").open("w")
        except OSError as error:
            raise UsageError(f"cannot write to {self.path}: {error.strerror}") from None
        with file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UsageError(f"{self.path} is in use by another process") from None
            except OSError as error:
                raise UsageError(f"cannot lock {self.path / '.lock'}: {error.strerror}") from None
            for draft in (path for name in FILES for path in self.path.glob(f".{name}.*")):
                draft.unlink()  # a crash left it half-written
            yield

    def create(self, experiment: Experiment, shares: Sequence[Tensor] | None, images: str | None) -> None:
        """Start a new run here; a directory that holds something else is left alone.

        shares, images: None where clients keep their images to themselves.
        """
        taken = {path.name for path in self.path.iterdir()}
        begun = "config.yaml" in taken and any(record["round"] > 0 for record in self.history())
        if begun or places(self.path / "checkpoint"):
            raise UsageError(f"{self.path} already holds a run: continue it with --resume, or choose another --out")
        strangers = taken - {*FILES, *SHOWN, ".lock", ".evaluation.lock", "checkpoint", "tensorboard"}
        if strangers:
            raise UsageError(f"{self.path} is not empty ({sorted(strangers)[0]}): choose another --out")
        for name in ("metrics.jsonl", "evaluation.json", "representations.safetensors", "report.html"):
            (self.path / name).unlink(missing_ok=True)  # of a run that did not get beyond its first evaluation
        self.write_images(shares, images)
        self.write_config(experiment)  # last: a directory with a configuration holds a run

    def write_images(self, shares: Sequence[Tensor] | None, images: str | None) -> None:
        """Write which client holds which images, and by what to know them."""
        if shares is not None:
            save_partition(self.path / "partition.json", shares)
        if images is not None:
            write_atomically(self.path / "images.blake2b", seal(images + "\n"))

    def begun(self) -> bool:
        """Whether there is a run here."""
        return (self.path / "config.yaml").exists() or experiment_in(self.path / "checkpoint") is not None

    def check_same(self, experiment: Experiment, images: str | None) -> None:
        """Refuse to go on with an experiment, or with images, other than those that the run began with."""
        if not self.begun():
            raise UsageError(f"{self.path} holds no run to resume")
        self.compare(experiment, self.config().flat())
        self.check_images(experiment, images)

    def check_images(self, experiment: Experiment, images: str | None) -> None:
        """Refuse other images than those that the run began with."""
        path = self.path / "images.blake2b"
        if images is None or not path.exists():
            return
        try:
            begun_with = unseal(path.read_text(encoding="utf-8")).strip()
        except ValueError:
            begun_with = ""
        if not begun_with:
            log.warning("%s is damaged: whether the images are those that the run began with cannot be told", path)
        elif begun_with != images:
            raise UsageError(
                f"the images of dataset={experiment.dataset} are not those that the run in {self.path} began with"
            )

    def compare(self, experiment: Experiment, begun: Mapping[str, Any]) -> None:
        """Refuse an experiment whose keys differ from those that a run or checkpoint began with."""
        ours = experiment.flat()
        begun = resolve(Experiment.parse(begun)).flat()  # keys that did not exist yet have their defaults
        free = [*FREE_KEYS, *(["rounds"] if open_ended(experiment) else [])]
        same = [k for k in ours if begun.get(k) in (ours[k], "auto") or any(k.startswith(key) for key in free)]
        changed = [k for k in ours if k not in same]
        if changed:
            shown = ", ".join(f"{key} was {begun.get(key)} and is now {ours[key]}" for key in changed[:3])
            more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
            raise UsageError(f"the run in {self.path} has another configuration: {shown}{more}")

    def config(self) -> Experiment:
        """The experiment that was begun here; where config.yaml is damaged or gone, as the last checkpoint knows it."""
        if self._config is None:
            self._config = self._read_config()
        return self._config

    def _read_config(self) -> Experiment:
        path = self.path / "config.yaml"
        try:
            return _sealed_experiment(self._existing("config.yaml"))
        except (UsageError, TrainingError) as error:
            if (kept := experiment_in(self.path / "checkpoint")) is None:
                raise
            why = str(error) if path.exists() else f"{path} is missing"
            log.warning("%s; the configuration is taken from %s", why, kept[1])
            return resolve(Experiment.parse(kept[0]))

    def write_config(self, experiment: Experiment) -> None:
        """Write the complete experiment."""
        write_atomically(self.path / "config.yaml", seal(experiment.to_yaml()))
        self._config = experiment

    def partition(self, images: int) -> list[Tensor] | None:
        """The clients' shares of `images` training images as the run began with them, if they can still be read."""
        path = self.path / "partition.json"
        try:
            return load_partition(path, images, untouched=True)
        except DataError as error:
            log.warning("%s; the partition is made anew from the seed", error)
            return None

    def append(self, record: Mapping[str, Any]) -> None:
        """Add a round to metrics.jsonl."""
        path = self.path / "metrics.jsonl"
        with naming(path), path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def history(self) -> list[dict[str, Any]]:
        """The rounds in metrics.jsonl; lines that are damaged, as by a crash, are left out."""
        path = self.path / "metrics.jsonl"
        return _records(path) if path.exists() else []

    def restore_history(self, kept: bytes | None, round_: int) -> list[dict[str, Any]]:
        """metrics.jsonl as it was after a round: what its checkpoint kept of it, or by itself where it kept nothing."""
        path = self.path / "metrics.jsonl"
        if kept is None:  # of an earlier version
            records = [record for record in self.history() if record["round"] <= round_]
            self.write_history(records)
            return records
        found = path.read_bytes() if path.exists() else b""
        if not path.exists() or not (kept.startswith(found) or found.startswith(kept)):
            log.warning("%s is damaged or missing; it is restored from its copy beside the checkpoints", path)
        write_atomically(path, kept.decode())
        return _records(path)

    def write_history(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Write metrics.jsonl anew."""
        write_atomically(self.path / "metrics.jsonl", "".join(json.dumps(record) + "\n" for record in records))

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Write summary.json."""
        write_atomically(self.path / "summary.json", json.dumps(summary, indent=2) + "\n")

    def summary(self) -> dict[str, Any]:
        """What summary.json holds."""
        path = self._existing("summary.json")
        try:
            summary = read_json(path)
        except (OSError, ValueError):
            summary = None
        if not isinstance(summary, dict) or type(summary.get("rounds")) is not int:
            raise TrainingError(f"{path} is damaged: `fedu2 train --resume` writes it anew")
        return summary

    def _existing(self, name: str) -> Path:
        path = self.path / name
        if not path.exists():
            raise TrainingError(f"{path} does not exist; is {self.path} a finished run?")
        return path


def _sealed_experiment(path: Path) -> Experiment:
    """The experiment in a run's own config.yaml, which nobody may have changed since it was written."""
    try:
        content = unseal(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} is damaged, or was changed by hand: {error}") from None
    if not content.strip():
        raise UsageError(f"{path} is damaged: it is empty")
    try:
        return Experiment.load(path)
    except UsageError as error:
        raise UsageError(f"{path} is damaged: {error}") from None


def _records(path: Path) -> list[dict[str, Any]]:
    """The rounds in a file of records; lines that are damaged are left out."""
    records: list[dict[str, Any]] = []
    for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), start=1):
        try:
            record = parse_json(line)
            records.append({**record, "round": _round_number(record["round"])})
        except (ValueError, TypeError, KeyError, OverflowError):
            log.warning("line %d of %s is damaged and left out", number, path)
    return records


def _round_number(value: Any) -> int:
    if isinstance(value, bool) or int(value) != float(value) or int(value) < 0:
        raise ValueError("no round")
    return int(value)


def open_ended(experiment: Experiment) -> bool:
    """Whether the number of rounds has no influence on any single round."""
    return experiment.optimizer.schedule == "constant" and experiment.byol.momentum_schedule == "constant"
