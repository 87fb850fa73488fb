"""What is beside the algorithm: listeners that watch a run. None of them can change a result."""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

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
    """Scalars of every round for TensorBoard, under `tensorboard/` of the run; if they fail, the run goes on.

    Written at once: PyTorch's own writer has a thread for it, which tells of a full disk by a traceback.
    """

    def __init__(self) -> None:
        self._file: IO[bytes] | None = None

    def on_start(self, experiment: Experiment, directory: Path, round_: int) -> None:
        try:
            from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        except ImportError:  # a slim installation can do without
            return
        with self._forgiving():
            folder = directory / "tensorboard"
            folder.mkdir(exist_ok=True)
            name = f"events.out.tfevents.{time.time_ns():020d}.{socket.gethostname()}.{os.getpid()}"
            self._file = (folder / name).open("xb", buffering=0)
            _write(self._file, Event(file_version="brain.Event:2"))
            if round_:  # what an interrupted run may have written of later rounds is void
                _write(self._file, Event(step=round_ + 1, session_log=SessionLog(status=SessionLog.START)))

    def on_round(self, record: Mapping[str, Any]) -> None:
        if self._file is None:
            return
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        scalars = {n: v for n, v in record.items() if isinstance(v, int | float) and n != "round"}
        values = [Summary.Value(tag=name, simple_value=value) for name, value in scalars.items()]
        with self._forgiving():
            _write(self._file, Event(step=record["round"], summary=Summary(value=values)))

    def close(self) -> None:
        with self._forgiving():
            if self._file is not None:
                self._file.close()

    @contextmanager
    def _forgiving(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self._file = None
            log.warning("TensorBoard's curves end here: %s", error)


def _write(file: IO[bytes], event: Any) -> None:
    from tensorboard.summary.writer.record_writer import RecordWriter

    event.wall_time = time.time()
    RecordWriter(file).write(event.SerializeToString())
