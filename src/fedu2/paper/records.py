"""Records: what a run of a cell came to, as one small JSON file that the program wrote.

    results/paper/cifar10-k10-a0.1/fedu2-byol/seed-0.json

Tables are rendered from records and from nothing else. A record carries a digest of its content, so that a figure
changed by hand is noticed, and its complete configuration, so that no run with other settings can stand in a cell.
"""

from __future__ import annotations

import json
import statistics
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from fedu2.errors import DataError, FedU2Error, TrainingError
from fedu2.evaluate import kept
from fedu2.evaluation.options import Protocols
from fedu2.experiment import Experiment
from fedu2.federation.play import summarise
from fedu2.files import digest_of, read_json, write_atomically
from fedu2.methods import resolve
from fedu2.paper.plan import Cell
from fedu2.resuming import FREE_KEYS
from fedu2.run import Run

__all__ = ["Record", "check_cell", "commit", "existing", "papers_own", "path_of", "read", "records_of", "write"]

Entry = Mapping[str, Any]
"""A measurement of `fedu2 evaluate`."""

FORMAT = 1
PRIVATE = ("data.root",)  # says nothing about a result, and much about a machine
FREE = (*FREE_KEYS, "precision", "seed")  # keys in which runs of the same cell may differ


Seconds = Annotated[float, Field(ge=0, le=1e9)]
Accuracy = Annotated[float, Field(ge=0, le=100)]


class _Strict(BaseModel, strict=True, allow_inf_nan=False):
    """No text for a number, no NaN."""


class _Setting(_Strict):
    dataset: str
    rounds: int


class _Measurement(_Strict):
    seeds: int
    values: list[Accuracy] = Field(min_length=1)
    seconds: Seconds = 0.0


class _Round(_Strict):
    round: Annotated[int, Field(ge=0)]
    seconds: Seconds = 0.0
    evaluation_seconds: Seconds = 0.0
    knn: Accuracy = 0.0
    bytes_up: Annotated[int, Field(ge=0)] = 0


class _Content(_Strict):
    """What tables rely on in a record, whose digest anybody can make right; there is more in it."""

    format: Literal[1]  # FORMAT
    cell: str
    seed: int
    experiment: _Setting
    evaluation: list[_Measurement]
    history: list[_Round]


@dataclass(frozen=True, eq=False)
class Record:
    """A record as it was read, whole and unchanged."""

    path: Path
    content: Mapping[str, Any]

    @property
    def cell(self) -> str:
        return str(self.content["cell"])

    @property
    def seed(self) -> int:
        return int(self.content["seed"])

    @property
    def rounds(self) -> int:
        """Played so far."""
        return int(self.content["history"][-1]["round"]) if self.content["history"] else 0

    @property
    def finished(self) -> bool:
        return self.rounds >= int(self.content["experiment"]["rounds"])

    @property
    def progress(self) -> tuple[int, int]:
        """Rounds and protocols; of two records of the same run the further one is kept."""
        return self.rounds, len(self.content["evaluation"])

    def score(self, protocol: str) -> float | None:
        """Accuracy in percent of the last round's encoder, by a protocol with the paper's settings."""
        if not self.finished:
            return None
        fitting = papers_own(self.content["evaluation"], protocol, self.content["experiment"]["dataset"], self.rounds)
        most = max(fitting, key=lambda entry: int(entry["seeds"]), default=None)  # of several the one with most seeds
        return None if most is None else statistics.fmean(most["values"])

    def bytes_sent(self) -> int:
        """By all clients to the server, in all rounds."""
        return sum(int(r.get("bytes_up", 0)) for r in self.content["history"])

    def seconds(self) -> float:
        """Of training, of judging between rounds, and of the protocols."""
        rounds = sum(r.get("seconds", 0.0) + r.get("evaluation_seconds", 0.0) for r in self.content["history"])
        return float(rounds + sum(entry.get("seconds", 0.0) for entry in self.content["evaluation"]))


def papers_own(entries: Sequence[Entry], protocol: str, dataset: str, round_: int) -> list[Entry]:
    """The measurements that tables may show: of the encoder after `round_`, on its data set, with default settings."""
    wanted = {"protocol": protocol, "encoder": "last", "round": round_, "data": dataset}
    wanted["options"] = Protocols().model_dump(mode="json")
    return [entry for entry in entries if all(entry.get(key) == value for key, value in wanted.items())]


def write(path: Path, cell: Cell, run: Run, commit: str, environment: Mapping[str, str]) -> Record:
    """The record of a run, finished or not; a record that is further along stays."""
    experiment = run.experiment
    check_cell(cell, experiment)
    content: dict[str, Any] = {
        "format": FORMAT,
        "cell": cell.name,
        "seed": experiment.seed,
        "commit": commit,
        "environment": dict(environment),
        "experiment": {key: value for key, value in experiment.flat().items() if key not in PRIVATE},
        "summary": _rounded(summarise(run.history)),
        "evaluation": [_unsealed(entry, run) for entry in kept(run)],
        "history": [_rounded(record) for record in run.history],
    }
    record = Record(path, content)
    before = existing(path, cell)
    if before is not None and before.progress > record.progress:
        return before
    write_atomically(path, _text({**content, "digest": digest_of(content)}))
    return record


def _unsealed(entry: Mapping[str, Any], run: Run) -> dict[str, Any]:
    """A measurement as `fedu2 evaluate` wrote it; one that was changed since makes no record."""
    content = {key: value for key, value in entry.items() if key != "digest"}
    if entry.get("digest") != digest_of(content):
        raise DataError(f"a figure in {run.path / 'evaluation.json'} was changed after it was measured: measure anew")
    return content


def read(path: Path) -> Record:
    """A record; one that is damaged, or was changed after it was written, is refused."""
    try:
        content = read_json(path)
        digest = content.pop("digest")
        _Content.model_validate(content)
        whole = digest == digest_of(content)
    except (ValueError, KeyError, TypeError, AttributeError, OSError):
        whole = False
    if not whole:
        raise DataError(f"{path} is not a record as this program wrote it: it was damaged, or changed afterwards")
    return Record(path, content)


def existing(path: Path, cell: Cell) -> Record | None:
    """The record at its place, if there is one; what is not of this cell, or of another seed, is refused."""
    if not path.exists():
        return None
    record = read(path)
    if not _fits(cell, record) or path.name != f"seed-{record.seed}.json":
        raise DataError(f"{path} is a record of something else than {cell.name}: move it elsewhere")
    return record


def records_of(cell: Cell, results: Path) -> Iterator[Record]:
    """The records of a cell by seed."""
    for path in sorted(path_of(cell, 0, results).parent.glob("seed-*.json")):
        record = existing(path, cell)
        assert record is not None
        yield record


def path_of(cell: Cell, seed: int, results: Path) -> Path:
    """Where the record of a cell lies."""
    return results / cell.setting / cell.row / f"seed-{seed}.json"


def commit() -> str:
    """The commit of the source tree that runs, `+` if it was changed since; empty outside of a checkout."""
    here = Path(__file__).parent

    def git(*arguments: str) -> str:
        command = ["git", *arguments]  # that of the user's path, as in a terminal
        found = subprocess.run(command, cwd=here, capture_output=True, text=True, check=True)  # nosec B603
        return found.stdout.strip()

    try:
        if not git("ls-files", "__init__.py"):  # installed somewhere inside of another repository
            return ""
        return git("rev-parse", "HEAD") + ("+" if git("status", "--porcelain", "--", "..") else "")
    except (OSError, subprocess.CalledProcessError):
        return ""


def check_cell(cell: Cell, experiment: Experiment) -> None:
    """Refuse the run of another configuration."""
    if changed := _differences(cell, resolve(experiment)):
        raise TrainingError(f"the run is not of cell {cell.name}: it has other values of {', '.join(changed[:5])}")


def _fits(cell: Cell, record: Record) -> bool:
    try:
        experiment = resolve(Experiment.parse(record.content["experiment"]))
    except FedU2Error:  # keys that have gone since
        return False
    seeds = record.seed == experiment.seed
    return record.cell == cell.name and seeds and not _differences(cell, experiment)


def _differences(cell: Cell, experiment: Experiment) -> list[str]:
    """Keys that decide the result and differ from the cell's."""
    wanted, found = cell.experiment(experiment.seed).flat(), experiment.flat()
    return [key for key in wanted if wanted[key] != found.get(key) and not any(key.startswith(free) for free in FREE)]


def _rounded(value: Any) -> Any:
    """Six digits are more than any of these figures deserves, and keep the files small."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, Mapping):
        return {key: _rounded(part) for key, part in value.items()}
    return [_rounded(part) for part in value] if isinstance(value, list) else value


def _text(content: Mapping[str, Any]) -> str:
    """A line a key, and in the history a line a round: readable, and quiet in version control."""
    lines = []
    for key, value in content.items():
        if isinstance(value, list) and value:
            rows = ",\n  ".join(json.dumps(part, ensure_ascii=False) for part in value)
            lines.append(f" {json.dumps(key)}: [\n  {rows}\n ]")
        else:
            lines.append(f" {json.dumps(key)}: {json.dumps(value, ensure_ascii=False)}")
    return "{\n" + ",\n".join(lines) + "\n}\n"
