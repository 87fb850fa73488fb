"""The files of one run: written atomically, never through links, read back with care, by one process at a time."""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from torch import Tensor

from fedu2 import parsing
from fedu2.data import digest_of_partition, load_partition, save_partition
from fedu2.errors import DataError, TrainingError, UsageError
from fedu2.experiment import Experiment
from fedu2.federation.checkpoint import newest_manifest, places
from fedu2.federation.journal import LONGEST
from fedu2.files import lock_file, naming, parse_json, read_bytes, read_json, read_text, seal, unseal, write_atomically
from fedu2.methods import left_out, resolve
from fedu2.resuming import check_keys

__all__ = ["RunDirectory", "refuse_link"]

log = logging.getLogger("fedu2")

FILES = (
    "config.yaml",
    "partition.json",
    "images.blake2b",
    "metrics.jsonl",
    "summary.json",
    "sites.json",
)
# What may lie where a run begins: of one that did not get far, whose configuration is written last, what it measured;
# and what other commands made, which stays.
FIRST = {"partition.json", "images.blake2b", "sites.json", "checkpoint", "tensorboard", ".lock", ".evaluation.lock"}
MEASURED = ("metrics.jsonl", "summary.json", "evaluation.json")
SHOWN = {"representations.safetensors", "figures", "report.html", "export"}
DRAFT = re.compile(rf"\.({'|'.join(map(re.escape, FILES))})\.[0-9a-f]+")


class RunDirectory:
    """A directory with one run in it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.data: dict[str, str] = {}  # what is known of images and partition, for checkpoints
        self._config: Experiment | None = None  # as it was read or written, so that damage is told once
        self._lock: int | None = None  # the open file by which others are kept out

    @staticmethod
    def new_name(experiment: Experiment, root: Path = Path("runs")) -> Path:
        """A new directory, such as runs/20260131-142501-fedu2-byol-sample, which nobody else is given.

        An ablation says so: fedu2-byol-without-fur-sample.
        """
        stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
        missing = [part.lower() for part in left_out(experiment)]
        what = [experiment.method, str(experiment.objective), *(["without", *missing] if missing else [])]
        name = "-".join([stamp, *what, experiment.dataset])
        for path in (root / name, *(root / f"{name}-{n}" for n in range(2, 1000))):
            with contextlib.suppress(FileExistsError):
                path.mkdir(parents=True)
                return path
        raise UsageError(f"{root} has a thousand runs of this second: choose a name with --out")

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
        for name in (".lock", "checkpoint", "tensorboard"):
            refuse_link(self.path / name)
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            file = lock_file(self.path / ".lock")
        except OSError as error:
            raise UsageError(f"cannot write to {self.path}: {error.strerror}") from None
        with file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UsageError(f"{self.path} is in use by another process") from None
            except OSError as error:
                raise UsageError(f"cannot lock {self.path / '.lock'}: {error.strerror}") from None
            self._lock = file.fileno()
            try:
                self.check_lock()
                for draft in filter(DRAFT.fullmatch, os.listdir(self.path)):
                    (self.path / draft).unlink()  # a crash left it half-written
                yield
            finally:
                self._lock = None

    def check_lock(self) -> None:
        """Stop where the file by which others are kept out was taken away: they may be at work here by now."""
        path = self.path / ".lock"
        try:
            held = self._lock is None or os.path.samestat(os.fstat(self._lock), path.lstat())
        except OSError:
            held = False
        if not held:
            raise TrainingError(f"{path} was removed or replaced, and another process may be at work in this run")

    def create(self, experiment: Experiment, shares: Sequence[Tensor] | None, images: str | None) -> None:
        """Start a new run here; a directory that holds something else is left alone.

        shares, images: None where clients keep their images to themselves.
        """
        taken = {path.name for path in self.path.iterdir()}
        begun = "config.yaml" in taken and any(record["round"] > 0 for record in self.history())
        if begun or places(self.path / "checkpoint"):
            raise UsageError(f"{self.path} already holds a run: continue it with --resume, or choose another --out")
        strangers = taken - FIRST - SHOWN - ({"config.yaml", *MEASURED} if "config.yaml" in taken else set())
        if strangers:
            raise UsageError(f"{self.path} is not empty ({sorted(strangers)[0]}): choose another --out")
        for name in filter(taken.__contains__, MEASURED):
            log.warning("%s is of a run that did not get beyond its first evaluation, and is removed", self.path / name)
            (self.path / name).unlink()
        self.write_images(shares, images)
        self.write_config(experiment)  # last: a directory with a configuration holds a run

    def write_images(self, shares: Sequence[Tensor] | None, images: str | None) -> None:
        """Write which client holds which images, and by what to know them; checkpoints will have that, too."""
        if shares is not None:
            save_partition(self.path / "partition.json", shares)
            self.data["partition"] = digest_of_partition(shares)
        if images is not None:
            write_atomically(self.path / "images.blake2b", seal(images + "\n"))
            self.data["images"] = images

    def begun(self) -> bool:
        """Whether there is a run here."""
        return (self.path / "config.yaml").exists() or newest_manifest(self.path / "checkpoint") is not None

    def _known(self, what: str) -> str | None:
        """What the checkpoints know of the run's images or partition, if they are of a version that told them."""
        found = newest_manifest(self.path / "checkpoint")
        data = found[0].get("data") if found else None
        known = data.get(what) if isinstance(data, dict) else None
        return known if isinstance(known, str) else None

    def check_same(self, experiment: Experiment, images: str | None) -> None:
        """Refuse to go on with an experiment, or with images, other than those that the run began with."""
        if not self.begun():
            raise UsageError(f"{self.path} holds no run to resume")
        check_keys(experiment, self.config().flat(), self.path)
        self.check_images(experiment, images)

    def check_images(self, experiment: Experiment, images: str | None) -> None:
        """Refuse other images than those that the run began with; what sites over Flower have is not known here."""
        path = self.path / "images.blake2b"
        if images is None or (self.path / "sites.json").exists():
            return
        try:
            begun_with = unseal(read_text(path)).strip()
        except (OSError, ValueError):
            begun_with = ""
        known = self._known("images")
        if not begun_with:
            told = "they are compared with what the checkpoint knows" if known else "they cannot be compared"
            log.warning("%s, by which the run's images are known, is missing or damaged: %s", path, told)
        for begun, ours in ((text.split(), images.split()) for text in (known or "", begun_with)):
            if begun != ours[: len(begun)]:  # earlier versions knew the training images alone
                what = "images" if begun[0] != ours[0] else "labels or test images"
                where = f"that the run in {self.path} began with"
                raise UsageError(f"the {what} of dataset={experiment.dataset} are not those {where}")

    def config(self, tell: bool = True) -> Experiment:
        """The experiment that was begun here; where config.yaml is damaged or gone, as the last checkpoint knows it.

        tell: warn of that; not where somebody reads it again anyway.
        """
        if self._config is None:
            self._config = self._read_config(logging.WARNING if tell else logging.DEBUG)
        return self._config

    def _read_config(self, level: int) -> Experiment:
        path, found = self.path / "config.yaml", newest_manifest(self.path / "checkpoint")
        try:
            return _sealed_experiment(self._existing("config.yaml"), bool(found and "data" in found[0]))
        except (UsageError, TrainingError) as error:
            if found is None:
                raise
            why = str(error) if path.exists() else f"{path} is missing"
            log.log(level, "%s; the configuration is taken from %s", why, found[1])
            return resolve(Experiment.parse(found[0]["experiment"]))

    def write_config(self, experiment: Experiment) -> None:
        """Write the complete experiment."""
        write_atomically(self.path / "config.yaml", seal(experiment.to_yaml()))
        self._config = experiment

    def partition(self, images: int, make: Callable[[], list[Tensor]]) -> list[Tensor]:
        """The clients' shares of `images` training images as the run began with them: read, or made anew."""
        path, known = self.path / "partition.json", self._known("partition")
        try:
            shares = load_partition(path, images, untouched=True)
            if known in (None, digest_of_partition(shares)):
                return shares
            why = f"the partition file {path} is not that which the run wrote"
        except DataError as error:
            why = str(error)
        log.warning("%s; the partition is made anew from the experiment", why)
        shares = make()
        if known not in (None, digest_of_partition(shares)):
            raise DataError(f"{why}, and what the experiment gives now is not the partition that the run began with")
        return shares

    def append(self, record: Mapping[str, Any]) -> None:
        """Add a round to metrics.jsonl."""
        self.check_lock()
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
        found = read_bytes(path, LONGEST) if path.exists() else b""
        if not path.exists() or not (kept.startswith(found) or found.startswith(kept)):
            log.warning("%s is damaged or missing; it is restored from its copy beside the checkpoints", path)
        write_atomically(path, kept.decode())
        return _records(path)

    def write_history(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Write metrics.jsonl anew."""
        write_atomically(self.path / "metrics.jsonl", "".join(json.dumps(record) + "\n" for record in records))

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Write summary.json."""
        self.check_lock()
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


def refuse_link(path: Path) -> None:
    """Nothing is written through links in a run's directory: they may lead to files of somebody else's."""
    if path.is_symlink():
        raise UsageError(f"{path} is a link, and nothing is written through links in a run: remove it")


def _sealed_experiment(path: Path, sealed: bool) -> Experiment:
    """The experiment in a run's own config.yaml, which nobody may have changed since it was written.

    sealed: its checksum must be there, which early versions did not write.
    """
    try:
        text = read_text(path, parsing.LONGEST)
        content = unseal(text)
        if sealed and content == text:
            raise ValueError("its checksum is gone")
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
    for number, line in enumerate(read_text(path, LONGEST, errors="replace").splitlines(), start=1):
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
