"""What a client tells of its training: the terms of its loss, epoch by epoch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedu2.errors import TrainingError
from fedu2.federation.backend import EpochReport, Observer
from fedu2.methods import Task

__all__ = ["Reading", "Report"]


@dataclass(frozen=True)
class Reading:
    """The terms of an epoch's steps, (steps, terms), on their way to the host."""

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
        self._check_finite(reading)
        count = len(reading.table)
        means = dict(zip(reading.names, reading.table.mean(0).tolist(), strict=True))
        for name, mean in means.items():
            self.sums[name] = self.sums.get(name, 0.0) + mean * count
        self.steps += count
        self.samples += reading.samples
        self.observer.on_epoch(EpochReport(self.task, self.steps, reading.samples, means))

    def means(self) -> dict[str, float]:
        """The mean of each term over all steps."""
        return {name: value / self.steps for name, value in self.sums.items()}

    def _check_finite(self, reading: Reading) -> None:
        broken = (~reading.table.isfinite()).nonzero()
        if len(broken):
            row, column = broken[0].tolist()
            where = f"round {self.task.round}, client {self.task.client}, step {self.steps + row + 1}"
            raise TrainingError(f"{reading.names[column]} became {reading.table[row, column].item()} in {where}")
