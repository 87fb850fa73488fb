"""What a client tells of its training: the terms of its loss, epoch by epoch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedu2.errors import TrainingError
from fedu2.federation.backend import EpochReport, Observer
from fedu2.federation.step import WATCHED
from fedu2.methods import Task

__all__ = ["Reading", "Report"]


@dataclass(frozen=True)
class Reading:
    """Of an epoch's steps the terms, then the largest number in what is WATCHED, (steps, terms + 2), on their way."""

    names: Sequence[str]
    table: Tensor
    samples: int
    arrived: torch.cuda.Event | None = None


class Report:
    """What a client tells of its training, epoch by epoch."""

    def __init__(self, task: Task, observer: Observer) -> None:
        self.task, self.observer = task, observer
        self.steps = self.samples = 0
        self.sums: dict[str, float] = {}

    def add(self, reading: Reading) -> None:
        """An epoch is over."""
        if reading.arrived:
            reading.arrived.synchronize()
        self.check(reading.names, reading.table)
        count = len(reading.table)
        terms = reading.table[:, : len(reading.names)].contiguous()
        means = dict(zip(reading.names, terms.mean(0).tolist(), strict=True))
        for name, mean in means.items():
            self.sums[name] = self.sums.get(name, 0.0) + mean * count
        self.steps += count
        self.samples += reading.samples
        self.observer.on_epoch(EpochReport(self.task, self.steps, reading.samples, means))

    def means(self) -> dict[str, float]:
        """The mean of each term over all steps."""
        return {name: value / self.steps for name, value in self.sums.items()}

    def check(self, names: Sequence[str], table: Tensor, done: int = 0) -> None:
        """Stop where a number is none: the first of the first step. `done` steps of the epoch come before the table."""
        finite = table.isfinite()
        if bool(finite.all()):
            return
        row, column = (~finite).nonzero()[0].tolist()
        where = f"round {self.task.round}, client {self.task.client}, step {self.steps + done + row + 1}"
        raise TrainingError(f"{(*names, *WATCHED)[column]} became {table[row, column].item()} in {where}")
