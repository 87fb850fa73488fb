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
from fedu2.files import write_atomically
from fedu2.methods import resolve

__all__ = ["RunDirectory", "open_ended"]

log = logging.getLogger("fedu2")

FILES = (
    "config.yaml",
    "partition.json",
    "images.blake2b",
    "metrics.jsonl",
    "summary.json",
    "evaluation.json",
    "sites.json",
)
SHOWN = ("representations.safetensors", "figures", "report.html", "export")  # what other commands make of a run
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
            except OSError:
                raise UsageError(f"{self.path} is in use by another process") from None
            for draft in (path for name in FILES for path in self.path.glob(f".{name}.*")):
                draft.unlink()  # a crash left it half-written
            yield

    def create(self, experiment: Experiment, shares: Sequence[Tensor] | None, images: str | None) -> None:
        """Start a new run here; a directory that holds something else is left alone.

        shares, images: None where clients keep their images to themselves.
        """
        taken = {path.name for path in self.path.iterdir()}
        if "config.yaml" in taken and any(record["round"] > 0 for record in self.history()):
            raise UsageError(f"{self.path} already holds a run: continue it with --resume, or choose another --out")
        strangers = taken - {*FILES, *SHOWN, ".lock", ".evaluation.lock", "checkpoint", "tensorboard"}
        if strangers:
            raise UsageError(f"{self.path} is not empty ({sorted(strangers)[0]}): choose another --out")
        for name in ("metrics.jsonl", "evaluation.json", "representations.safetensors", "report.html"):
            (self.path / name).unlink(missing_ok=True)  # of a run that did not get beyond its first evaluation
        if shares is not None:
            save_partition(self.path / "partition.json", shares)
        if images is not None:
            write_atomically(self.path / "images.blake2b", images + "\n")
        self.write_config(experiment)  # last: a directory with a configuration holds a run

    def begun(self) -> bool:
        """Whether there is a run here."""
        return (self.path / "config.yaml").exists()

    def check_same(self, experiment: Experiment, images: str | None) -> None:
        """Refuse to go on with an experiment, or with images, other than those that the run began with."""
        if not self.begun():
            raise UsageError(f"{self.path} holds no run to resume")
        self.compare(experiment, self.config().flat())
        self.check_images(experiment, images)

    def check_images(self, experiment: Experiment, images: str | None) -> None:
        """Refuse other images than those that the run began with."""
        begun_with = self.path / "images.blake2b"
        if images is not None and begun_with.exists() and begun_with.read_text(encoding="utf-8").strip() != images:
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
        """The experiment that was begun here."""
        return Experiment.load(self._existing("config.yaml"))

    def write_config(self, experiment: Experiment) -> None:
        """Write the complete experiment."""
        write_atomically(self.path / "config.yaml", experiment.to_yaml())

    def partition(self, images: int) -> list[Tensor] | None:
        """The clients' shares of `images` training images as the run began with them, if they can still be read."""
        path = self.path / "partition.json"
        try:
            return load_partition(path, images)
        except DataError as error:
            log.warning("%s; the partition is made anew from the seed", error)
            return None

    def append(self, record: Mapping[str, Any]) -> None:
        """Add a round to metrics.jsonl."""
        with (self.path / "metrics.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def history(self) -> list[dict[str, Any]]:
        """The rounds in metrics.jsonl; lines that are damaged, as by a crash, are left out."""
        path = self.path / "metrics.jsonl"
        if not path.exists():
            return []
        records: list[dict[str, Any]] = []
        for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), start=1):
            try:
                record = json.loads(line)
                records.append({**record, "round": _round_number(record["round"])})
            except (ValueError, TypeError, KeyError, OverflowError):
                log.warning("line %d of %s is damaged and left out", number, path)
        return records

    def forget_rounds_after(self, round_: int) -> None:
        """Drop the lines of rounds that are played again after a resume."""
        kept = [record for record in self.history() if record["round"] <= round_]
        write_atomically(self.path / "metrics.jsonl", "".join(json.dumps(record) + "\n" for record in kept))

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Write summary.json."""
        write_atomically(self.path / "summary.json", json.dumps(summary, indent=2) + "\n")

    def summary(self) -> dict[str, Any]:
        """What summary.json holds."""
        return dict(json.loads(self._existing("summary.json").read_text(encoding="utf-8")))

    def _existing(self, name: str) -> Path:
        path = self.path / name
        if not path.exists():
            raise TrainingError(f"{path} does not exist; is {self.path} a finished run?")
        return path


def _round_number(value: Any) -> int:
    if isinstance(value, bool) or int(value) != float(value) or int(value) < 0:
        raise ValueError("no round")
    return int(value)


def open_ended(experiment: Experiment) -> bool:
    """Whether the number of rounds has no influence on any single round."""
    return experiment.optimizer.schedule == "constant" and experiment.byol.momentum_schedule == "constant"
