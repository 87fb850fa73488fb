"""All clients in this process, on one device: one after another, or a few at once in lanes.

A lane has one model that serves client after client: its vectors are overwritten in place, and nothing is rebuilt. On a
GPU a lane is also a stream and a captured training step that it replays; the small kernels of one lane then run in the
gaps of another. What a client computes does not depend on the lane or on who trains beside it.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from fedu2.data import ImageSet
from fedu2.engine import Engine, choose, without_graph
from fedu2.errors import FedU2Error, first_line
from fedu2.federation.backend import Observer
from fedu2.federation.lane import Lane
from fedu2.methods import Memory, Method, Reply, ServerState, Task

__all__ = ["LocalBackend"]

log = logging.getLogger("fedu2")

AHEAD = 2  # stretches of steps that wait on a lane's stream while the host serves other lanes


class LocalBackend:
    """Runs tasks on the device where the images are."""

    def __init__(
        self, method: Method, images: ImageSet, shares: Sequence[Tensor], engine: Engine | None = None
    ) -> None:
        engine = engine or choose(method.experiment, images.images.device)
        first, self.engine = _first_lane(method, images.images, shares, engine)
        others = range(1, self.engine.lanes)
        self.lanes = [first, *(Lane(method, images.images, shares, self.engine) for _ in others)]

    def run(
        self, tasks: Sequence[Task], server: ServerState, memories: Mapping[int, Memory], observer: Observer
    ) -> Iterator[Reply]:
        """Train the tasks, on several lanes in an order that keeps all of them busy to the end."""
        waiting = _Queue(tasks, self.lanes)
        idle = list(self.lanes)
        busy: dict[Lane, Generator[None, None, Reply]] = {}
        try:
            while waiting or busy:
                while waiting and idle:
                    lane = idle.pop()
                    task = waiting.pop(lane)
                    busy[lane] = lane.train(task, server, memories.get(task.client), observer)
                for lane in self._ready(list(busy)):
                    try:
                        next(busy[lane])
                    except StopIteration as end:
                        del busy[lane]
                        idle.append(lane)
                        yield end.value
        finally:
            for lane in busy:
                lane.wait()

    def _ready(self, lanes: list[Lane]) -> list[Lane]:
        """The lanes whose streams will soon run dry; waits until there is one."""
        ready = [lane for lane in lanes if lane.wants_a_turn(AHEAD)]
        if not ready:
            lanes[0].wait_for_oldest()
            ready = [lanes[0]]
        return ready


class _Queue:
    """Tasks that wait for a lane: the longest first, so that all lanes end at about the same time.

    Clients smaller than a batch are for the first lane, and for others when nothing else is left: their steps are
    launched kernel by kernel, and meanwhile the other lanes have long work for the GPU.
    """

    def __init__(self, tasks: Sequence[Task], lanes: Sequence[Lane]) -> None:
        self.first = lanes[0]
        several = len(lanes) > 1
        longest = sorted(tasks, key=lambda task: -task.steps) if several else tasks
        self.odd = deque(task for task in longest if several and self.first.is_odd(task))
        self.usual = deque(task for task in longest if not (several and self.first.is_odd(task)))

    def __len__(self) -> int:
        return len(self.odd) + len(self.usual)

    def pop(self, lane: Lane) -> Task:
        """The next task for an idle lane."""
        queues = (self.odd, self.usual) if lane is self.first else (self.usual, self.odd)
        return next(queue for queue in queues if queue).popleft()


def _first_lane(method: Method, images: Tensor, shares: Sequence[Tensor], engine: Engine) -> tuple[Lane, Engine]:
    """A lane that has been tried out, and the engine that is left without what does not work here."""
    lane = Lane(method, images, shares, engine)
    if engine.fused or engine.compile:
        try:
            lane.try_out()
        except (FedU2Error, torch.OutOfMemoryError):
            raise
        except Exception as error:
            engine = replace(engine, fused=False, compile=False)
            lane = Lane(method, images, shares, engine)
            lane.try_out()  # an error that has nothing to do with the engine comes out here
            why = first_line(error)
            log.warning("fused and compiled kernels do not work here (%s): going on with PyTorch's own", why)
    if not lane.can_capture():
        engine = without_graph(engine, method.experiment)
    return lane, engine
