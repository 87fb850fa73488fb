"""One model that serves client after client."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from itertools import islice

import torch
from torch import Tensor

from fedu2.engine import Engine
from fedu2.federation.backend import Observer
from fedu2.federation.batches import batches_in_epoch, local_batches, sizes_of
from fedu2.federation.capture import WARM_UP, CapturedSteps
from fedu2.federation.report import Reading, Report
from fedu2.federation.step import Step
from fedu2.methods import Memory, Method, Reply, ServerState, Task
from fedu2.models.flat import FlatModel
from fedu2.seeds import generator

__all__ = ["Lane"]

STRETCH = 16  # steps that are launched on a GPU before another lane gets its turn


class Lane:
    """Trains one client at a time, on a stream of its own where there is a GPU.

    order: (batches, rows, B) an epoch's batches, `position` the next one; a second row holds other images for methods
    that want them.  history: (batches, terms + 2) what `Reading` tells of each step.
    """

    def __init__(self, method: Method, images: Tensor, shares: Sequence[Tensor], engine: Engine) -> None:
        self.method, self.shares, self.experiment = method, shares, method.experiment
        self.model = FlatModel(method.learner(), images.device)
        self.step = Step(method, self.model, images, engine)
        batches = max(batches_in_epoch(len(share), self.experiment) for share in shares)
        size = min(self.experiment.batch_size, max(len(share) for share in shares))
        self.rows = 2 if method.wants_others else 1
        shape = max(batches, WARM_UP + 1), self.rows, size
        self.order = torch.zeros(shape, dtype=torch.int64, device=images.device)
        self.position = torch.zeros(1, dtype=torch.int64, device=images.device)
        self.history: Tensor | None = None
        self.stream = torch.cuda.Stream(images.device) if images.is_cuda else None
        self.marks: deque[torch.cuda.Event] = deque()  # ends of the stretches of steps that are on the stream
        self.finishing = False  # nothing is left to launch for the client
        self.captured: CapturedSteps | None = None
        if self.stream and engine.graph:
            self.captured = CapturedSteps(self._train_on_next, self.stream, self.step.noise)

    def train(
        self, task: Task, server: ServerState, memory: Memory | None, observer: Observer
    ) -> Generator[None, None, Reply]:
        """Local training of one client; pauses wherever another lane may have its turn."""
        share = self.shares[task.client]
        self._capture(share, task)
        self.method.receive(self.model, server, memory, task)
        self.step.begin(task)
        self._follow_default_stream()

        report = Report(task, observer)
        stretch = STRETCH if self.stream else 1  # on a CPU each step is looked at as soon as it is done
        batches = self._batches(share, task)
        unread: Reading | None = None
        while epoch := list(islice(batches, batches_in_epoch(len(share), self.experiment))):
            self._load(epoch)
            for begin in range(0, len(epoch), stretch):
                self._advance([len(batch[0]) for batch in epoch[begin : begin + stretch]], task)
                if not self.stream and self.history is not None:
                    report.check(self.step.names, self.history[begin : begin + stretch], begin)
                yield
            if unread:  # of the epoch before: it has arrived while this one was being launched
                report.add(unread)
            unread = self._read(epoch)
            if not self.stream:  # nothing is on its way
                report.add(unread)
                unread = None
        self.finishing = True
        yield  # other lanes need not wait for the last steps of this one
        self.wait()
        if unread:
            report.add(unread)
        return Reply(
            client=task.client,
            examples=len(share),
            samples=report.samples,
            model=self.model.state(*self.method.travelling),
            memory=self.method.remember(self.model, server, memory, task),
            payload=self.method.payload(self.model, task),
            metrics={**report.means(), **self.method.notes(self.model, server, memory, task)},
        )

    def try_out(self) -> None:
        """One step on some client's images, to see whether it works here at all; the model stays as it is."""
        size = self.size
        with self._rehearsal():
            self._load([[max(self.shares, key=len)[:size]] * self.rows])
            with torch.cuda.stream(self.stream):
                self._train_on_next(size)
            self.wait()

    @property
    def size(self) -> int:
        """The usual batch size."""
        return self.order.shape[2]

    def can_capture(self) -> bool:
        """Whether the usual step is captured now, or need not be."""
        largest = max(range(len(self.shares)), key=lambda client: len(self.shares[client]))
        self._capture(self.shares[largest], Task(1, largest, 1, self.experiment.optimizer.lr, 0.0))
        return self.captured is None or self.captured.refusal is None

    def is_odd(self, task: Task) -> bool:
        """Whether the client is smaller than a batch, so that its steps keep the host busier than the GPU."""
        return len(self.shares[task.client]) < self.size

    def wants_a_turn(self, ahead: int) -> bool:
        """Whether fewer than `ahead` stretches are on the stream; with nothing to add to them, whether none is."""
        while self.marks and self.marks[0].query():
            self.marks.popleft()
        return len(self.marks) < (1 if self.finishing else ahead)

    def wait_for_oldest(self) -> None:
        """Until the oldest stretch is done."""
        self.marks.popleft().synchronize()

    def wait(self) -> None:
        """Until all work of this lane is done."""
        self.marks.clear()
        self.finishing = False
        if self.stream:
            self.stream.synchronize()

    def _capture(self, share: Tensor, task: Task) -> None:
        """Capture the step for this client's batches if that is due; before its model arrives, for it trains."""
        tempo = self.step.learner.tempo(task.progress)
        for size in sizes_of(len(share), self.experiment):
            if self.captured and self.captured.wants(size, tempo, usual=size == self.size):
                with self._rehearsal():
                    self.step.begin(task)
                    self._load([[share[:size]] * self.rows] * (WARM_UP + 1))
                    self.captured.capture(size, tempo)
                    if self.captured.refusal:  # the generator still believes that it is being captured
                        self.step.noise = torch.Generator(self.step.noise.device)

    @contextlib.contextmanager
    def _rehearsal(self) -> Iterator[None]:
        """Steps in here leave the model as it was."""
        params, buffers = self.model.params.clone(), self.model.buffers.clone()
        self._follow_default_stream()
        try:
            yield
        finally:
            self.wait()
            self.model.params.copy_(params)
            self.model.buffers.copy_(buffers)

    def _follow_default_stream(self) -> None:
        if self.stream:
            self.stream.wait_stream(torch.cuda.current_stream(self.stream.device))

    def _batches(self, share: Tensor, task: Task) -> Iterator[tuple[Tensor, ...]]:
        """What each step trains on: a batch, and beside it other images of the client where the method wants them."""
        rows = []
        for name in ("order", "others")[: self.rows]:
            order = generator("cpu", self.experiment.seed, name, task.round, task.client)
            rows.append(local_batches(share, task.steps, self.experiment, order))
        return zip(*rows, strict=True)

    def _load(self, epoch: Sequence[Sequence[Tensor]]) -> None:
        """Put an epoch's batches where the step finds them."""
        host = torch.zeros(len(epoch), *self.order.shape[1:], dtype=torch.int64, pin_memory=self.stream is not None)
        for rows, batches in zip(host, epoch, strict=True):
            for row, batch in zip(rows, batches, strict=True):
                row[: len(batch)] = batch
        with torch.cuda.stream(self.stream):
            self.order[: len(epoch)].copy_(host, non_blocking=True)
            self.position.zero_()

    def _advance(self, sizes: Sequence[int], task: Task) -> None:
        """Launch steps on batches of these sizes."""
        tempo = self.step.learner.tempo(task.progress)
        with torch.cuda.stream(self.stream):
            for size in sizes:
                if self.captured:
                    self.captured(size, tempo)
                else:
                    self._train_on_next(size)
            if self.stream:
                self.marks.append(self.stream.record_event())

    def _train_on_next(self, size: int) -> None:
        """One step on the next batch; this is what a graph captures."""
        with _convolutions(searched=size == self.size):
            row = self.step(self.order.index_select(0, self.position)[0, :, :size])
        if self.history is None:
            self.history = row.new_zeros(len(self.order), len(row))
        self.history.index_copy_(0, self.position, row[None])
        self.position += 1

    def _read(self, epoch: Sequence[Sequence[Tensor]]) -> Reading:
        """Send what was found in an epoch's steps to the host, without waiting for it."""
        assert self.history is not None, "the first step makes it"
        samples, rows = sum(len(batch[0]) for batch in epoch), self.history[: len(epoch)]
        if not self.stream:
            return Reading(self.step.names, rows.clone(), samples)
        with torch.cuda.stream(self.stream):
            table = torch.empty(rows.shape, pin_memory=True).copy_(rows, non_blocking=True)
            return Reading(self.step.names, table, samples, self.stream.record_event())


def _convolutions(searched: bool) -> contextlib.AbstractContextManager[None]:
    """cuDNN tries its algorithms at a size's first step, or takes the one it believes in, and stays with either.

    A search takes seconds: too long for a size that few steps have.
    """
    cudnn = torch.backends.cudnn
    return cudnn.flags(cudnn.enabled, searched, cudnn.benchmark_limit, cudnn.deterministic, cudnn.allow_tf32)
