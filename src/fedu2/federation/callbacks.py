"""What is beside the algorithm: listeners that watch a run. None of them can change a result."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fedu2.experiment import Experiment
from fedu2.federation.backend import EpochReport
from fedu2.methods import Task

__all__ = ["Callback", "Callbacks", "TensorBoard"]

log = logging.getLogger("fedu2")


class Callback:
    """Override what you want to hear."""

    def on_start(self, experiment: Experiment, directory: Path, round_: int) -> None:
        """A run begins, or goes on after `round_` rounds."""

    def on_tasks(self, tasks: Sequence[Task]) -> None:
        """A round begins, with these clients."""

    def on_epoch(self, report: EpochReport) -> None:
        """A client has finished a local epoch."""

    def on_round(self, record: Mapping[str, Any]) -> None:
        """A round is over; `record` is its line in metrics.jsonl. Round 0 is the untrained model."""

    def on_end(self, summary: Mapping[str, Any]) -> None:
        """The run is over."""

    def close(self) -> None:
        """Called last, also after a failure."""


class Callbacks(Callback):
    """Several listeners as one."""

    def __init__(self, callbacks: Sequence[Callback]) -> None:
        self.callbacks = callbacks

    def on_start(self, experiment: Experiment, directory: Path, round_: int) -> None:
        for callback in self.callbacks:
            callback.on_start(experiment, directory, round_)

    def on_tasks(self, tasks: Sequence[Task]) -> None:
        for callback in self.callbacks:
            callback.on_tasks(tasks)

    def on_epoch(self, report: EpochReport) -> None:
        for callback in self.callbacks:
            callback.on_epoch(report)

    def on_round(self, record: Mapping[str, Any]) -> None:
        for callback in self.callbacks:
            callback.on_round(record)

    def on_end(self, summary: Mapping[str, Any]) -> None:
        for callback in self.callbacks:
            callback.on_end(summary)

    def close(self) -> None:
        for callback in self.callbacks:
            callback.close()


class TensorBoard(Callback):
    """Scalars of every round for TensorBoard, under `tensorboard/` of the run; if they fail, the run goes on."""

    def __init__(self) -> None:
        self._writer: Any = None

    def on_start(self, experiment: Experiment, directory: Path, round_: int) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:  # a slim installation can do without
            return
        with self._forgiving():
            self._writer = SummaryWriter(str(directory / "tensorboard"), purge_step=round_ + 1 if round_ else None)

    def on_round(self, record: Mapping[str, Any]) -> None:
        with self._forgiving():
            for name, value in record.items():
                if self._writer is not None and isinstance(value, int | float) and name != "round":
                    self._writer.add_scalar(name, value, record["round"])

    def close(self) -> None:
        with self._forgiving():
            if self._writer is not None:
                self._writer.close()

    @contextmanager
    def _forgiving(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self._writer = None
            log.warning("TensorBoard's curves end here: %s", error)
