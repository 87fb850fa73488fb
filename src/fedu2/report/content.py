"""What the report tells of a run: its directory, read with care into plain values, whatever state the run is in."""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from fedu2.errors import UsageError
from fedu2.evaluation.alarm import Sign, first_signs
from fedu2.experiment import Experiment
from fedu2.files import read_json
from fedu2.rundir import RunDirectory

__all__ = ["Point", "Score", "Sheet", "distinct_names", "read_sheets"]

log = logging.getLogger("fedu2")

Point = tuple[int, float | None]
"""A round and what was measured in it; None where that was not a number."""


@dataclass(frozen=True)
class Score:
    """What `fedu2 evaluate` found: mean and deviation over seeds, of the encoder after a round."""

    mean: float
    deviation: float
    seeds: int
    round: int


@dataclass(frozen=True)
class Sheet:
    """One run, as far as it has come; without an experiment it has not begun."""

    path: Path
    name: str
    experiment: Experiment | None = None
    series: Mapping[str, Sequence[Point]] = field(default_factory=dict)
    clients: Mapping[str, Sequence[Any]] = field(default_factory=dict)  # columns of the last round's table
    scores: Mapping[tuple[str, str, str], Score] = field(default_factory=dict)  # by protocol, encoder, data
    environment: Mapping[str, str] = field(default_factory=dict)
    signs: Mapping[str, Sign] = field(default_factory=dict)  # of a collapse, by figure
    played: int | None = None  # the last round; 0: the untrained encoder was judged; None: nothing yet

    @property
    def finished(self) -> bool:
        """Whether all planned rounds are played."""
        return self.experiment is not None and (self.played or 0) >= self.experiment.rounds

    def values(self, name: str) -> list[tuple[int, float]]:
        """The points of a series that are numbers."""
        return [(round_, value) for round_, value in self.series.get(name, ()) if value is not None]

    def untrained(self, name: str) -> float | None:
        """The value before the first round."""
        return next((value for round_, value in self.values(name) if round_ == 0), None)

    def last(self, name: str) -> tuple[int, float] | None:
        """The last round, after the first one began, that has a value, and the value."""
        return next((point for point in reversed(self.values(name)) if point[0] > 0), None)

    def best(self, name: str) -> tuple[int, float] | None:
        """The first of the rounds with the highest value."""
        return max((point for point in self.values(name) if point[0] > 0), key=lambda point: point[1], default=None)

    @property
    def seconds(self) -> float:
        """Training time of all rounds."""
        return sum(value for _, value in self.values("seconds"))

    @property
    def speed(self) -> float | None:
        """Samples per second over all rounds."""
        speeds = dict(self.values("samples_per_second"))
        timed = [(seconds, speeds[round_]) for round_, seconds in self.values("seconds") if round_ in speeds]
        total = sum(seconds for seconds, _ in timed)
        return sum(seconds * speed for seconds, speed in timed) / total if total else None


def read_sheets(paths: Sequence[Path], *, waiting: bool = False) -> list[Sheet]:
    """The runs at `paths`, then those that `--compare` made inside them; each once, under a name of its own.

    waiting: a run that is not there yet has an empty sheet; otherwise it is an error.
    """
    inside = [path / "fedavg" for path in paths if (path / "fedavg" / "config.yaml").exists()]
    found: dict[Path, Path] = {}
    for path in (*paths, *inside):
        found.setdefault(path.resolve(), path)
    names = distinct_names(list(found), {path.resolve() for path in inside})
    return [_read(path, name, waiting) for path, name in zip(found.values(), names, strict=True)]


def distinct_names(paths: Sequence[Path], inside: Collection[Path] = ()) -> list[str]:
    """The last part of each path, or as many parts as tell it from the others; two or more for a run inside another."""

    def name(path: Path, parts: int) -> str:
        return "/".join(path.parts[-parts:])

    def alone(path: Path, parts: int) -> bool:
        return parts >= len(path.parts) or [name(other, parts) for other in paths].count(name(path, parts)) == 1

    return [
        name(path, next(parts for parts in count(2 if path in inside else 1) if alone(path, parts))) for path in paths
    ]


def _read(path: Path, name: str, waiting: bool) -> Sheet:
    directory = RunDirectory(path)
    if not directory.begun():
        if not waiting or path.is_file():
            raise UsageError(f"{path} holds no run")
        return Sheet(path, name)
    records = _by_round(directory.history())
    return Sheet(
        path,
        name,
        directory.config(),
        _series(records),
        _client_columns(records, path),
        _scores(_json(path / "evaluation.json")),
        _environment(_json(path / "summary.json")),
        first_signs(list(records.values())),
        max(records, default=None),
    )


def _by_round(history: Sequence[Mapping[str, Any]]) -> dict[int, Mapping[str, Any]]:
    """Records in the order of their rounds; of a round that was written twice, the later one."""
    records = {int(record["round"]): record for record in history}
    return {round_: records[round_] for round_ in sorted(records)}


def _series(records: Mapping[int, Mapping[str, Any]]) -> dict[str, list[Point]]:
    """Every scalar of metrics.jsonl over the rounds that have it."""
    series: dict[str, list[Point]] = {}
    for round_, record in records.items():
        for name, value in record.items():
            if name != "round" and _is_number(value):
                series.setdefault(name, []).append((round_, _finite(value)))
    return series


def _client_columns(records: Mapping[int, Mapping[str, Any]], path: Path) -> dict[str, list[Any]]:
    """The clients of the last round, their numbers of images, and every list that has a number for each of them."""
    last: Mapping[str, Any] = next((record for record in reversed(list(records.values())) if record.get("clients")), {})
    clients = last.get("clients")
    if not isinstance(clients, list):
        return {}
    columns: dict[str, list[Any]] = {"client": clients}
    shares = _json(path / "partition.json")
    lists = shares.get("clients") if isinstance(shares, dict) else shares
    sizes = [len(share) if isinstance(share, list) else None for share in lists] if isinstance(lists, list) else []
    if all(isinstance(client, int) and 0 <= client < len(sizes) for client in clients):
        columns["images"] = [sizes[client] for client in clients]
    for name, values in last.items():
        if name != "clients" and isinstance(values, list) and len(values) == len(clients):
            columns[name] = [_finite(value) if _is_number(value) else None for value in values]
    return columns


def _scores(entries: Any) -> dict[tuple[str, str, str], Score]:
    """Of measurements that differ in their settings alone, the latest."""
    scores: dict[tuple[str, str, str], Score] = {}
    for entry in entries if isinstance(entries, list) else []:
        try:
            key = (str(entry["protocol"]), str(entry["encoder"]), str(entry["data"]))
            score = Score(float(entry["mean"]), float(entry["deviation"]), len(entry["values"]), int(entry["round"]))
        except (KeyError, TypeError, ValueError):
            continue
        if math.isfinite(score.mean):
            scores.pop(key, None)
            scores[key] = score
    return scores


def _environment(summary: Any) -> dict[str, str]:
    found = summary.get("environment") if isinstance(summary, dict) else None
    return {str(key): str(value) for key, value in found.items()} if isinstance(found, dict) else {}


def _json(path: Path) -> Any:
    """What a JSON file holds; None where it is missing or damaged."""
    try:
        return read_json(path)
    except FileNotFoundError:
        return None
    except (OSError, ValueError):
        log.warning("%s is damaged and left out", path)
        return None


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _finite(value: float) -> float | None:
    try:
        return value if math.isfinite(value) else None
    except OverflowError:  # a whole number of hundreds of digits
        return None
