"""The clients of a round in several processes of one machine, each with a device of its own.

    torchrun --nproc-per-node 4 -m fedu2 train ...

The first process leads: it alone knows of rounds, aggregation, evaluation and the run directory. The others follow:
they are told an experiment and the clients' shares, and then train whichever tasks they are handed, until the leader
is gone. A client's update depends on (seed, round, client) alone, so the result does not depend on their number.

A message is its header's length, a header in JSON, and the bytes of the tensors that the header lists. Gloo carries it
through host memory, over the loopback device; an end that dies closes its connections, and the other end notices.
"""

from __future__ import annotations

import atexit
import functools
import json
import logging
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from fedu2.errors import FedU2Error, TrainingError, UsageError, first_line
from fedu2.experiment import Experiment
from fedu2.federation.backend import Absent, Backend, EpochReport, Observer, trusts
from fedu2.federation.callbacks import Callback
from fedu2.methods import Memory, Reply, ServerState, Task
from fedu2.models.flat import ModelState

__all__ = ["Prepare", "ProcessBackend", "Processes", "deal", "join", "own_device"]

Prepare = Callable[[Experiment, Sequence[Tensor]], tuple[Backend, torch.device]]
"""Makes a follower's backend, and the device it works on, from the experiment and the clients' shares."""

Tensors = Mapping[str, Mapping[str, Tensor]]
"""What travels beside a header: named tensors in named groups."""

_Posted = list[tuple[dist.Work | None, Tensor]]
"""What is being sent; the tensors must live until it has been."""

TO_MEET = timedelta(minutes=5)  # processes that start together have found each other by then
TO_ANSWER = timedelta(hours=12)  # a process that lives, but neither trains nor sends, is given up


class _Gone(TrainingError):  # noqa: N818 (a condition of the other end)
    """The other end of a connection has ended, or is silent."""


@functools.cache  # once: a process belongs to the same group for life
def join() -> Processes | None:
    """Meet the processes that torchrun started with this one; None where it is the only one."""
    rank, size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if size == 1:
        return None
    if size != int(os.environ.get("LOCAL_WORLD_SIZE", size)):
        raise UsageError("training in several processes is for one machine; start torchrun without --nnodes")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    try:
        dist.init_process_group("gloo", timeout=TO_MEET)
    except (RuntimeError, ValueError) as error:
        raise TrainingError(f"the {size} processes did not meet: {first_line(error)}") from None
    if rank == 0:
        signal.signal(signal.SIGTERM, _told_to_end)
    group = Processes(rank, size)
    atexit.register(group.leave)
    return group


def _told_to_end(*_: object) -> None:
    raise TrainingError("told to end by SIGTERM, as torchrun does when another process has died")


def own_device(device: torch.device) -> torch.device:
    """What of `device` is this process's: a GPU of its own where `cuda` was asked for and there is one for each."""
    rank, size = int(os.environ.get("LOCAL_RANK", 0)), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if device.type != "cuda" or device.index is not None or not 1 < size <= torch.cuda.device_count():
        return device
    torch.cuda.set_device(rank)
    return torch.device("cuda", rank)


def deal(tasks: Sequence[Task], processes: int) -> list[int]:
    """The process of each task: the longest task first, always onto the process that has least to do."""
    load, ranks = [0] * processes, [0] * len(tasks)
    for index in sorted(range(len(tasks)), key=lambda i: -tasks[i].steps):  # stable
        ranks[index] = min(range(processes), key=load.__getitem__)
        load[ranks[index]] += tasks[index].steps
    return ranks


@dataclass(frozen=True)
class Processes:
    """One process's place among all; rank 0 leads."""

    rank: int
    size: int

    def lead(self, inner: Backend, experiment: Experiment, shares: Sequence[Tensor]) -> ProcessBackend:
        """A backend that trains in all processes; `inner` trains the leader's part."""
        if not dist.is_initialized():
            raise TrainingError("the other processes ended with an earlier failure: start them anew")
        named = {str(client): share for client, share in enumerate(shares)}
        for rank in range(1, self.size):
            _settle(rank, _post(rank, {"experiment": experiment.flat()}, {"shares": named}))
        return ProcessBackend(self, inner)

    def follow(self, prepare: Prepare) -> int:
        """Work for the leader until it is gone, in silence: only the leader speaks to the user. An exit code."""
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # a message that is waited for does not let Python notice
        logging.getLogger("fedu2").setLevel(logging.CRITICAL)
        worker = _Worker(self.rank, prepare)
        try:
            while True:
                header, tensors = _receive(0)
                if "experiment" in header:
                    worker.prepare(header, tensors)
                else:
                    worker.train(header, tensors)
        except _Gone:
            return 0  # whatever happened, the leader has said it

    def leave(self) -> None:
        """Close the connections, which ends the followers."""
        if dist.is_initialized():
            dist.destroy_process_group()


class ProcessBackend:
    """The leader's backend: deals the tasks, and collects the replies in the order of the tasks."""

    def __init__(self, group: Processes, inner: Backend) -> None:
        self.group = group
        self.inner = inner
        self.trusted = trusts(inner)

    def run(
        self, tasks: Sequence[Task], server: ServerState, memories: Mapping[int, Memory], observer: Observer
    ) -> Iterator[Reply | Absent]:
        """Train the tasks in all processes; a follower's client is reported when its reply arrives."""
        ranks = deal(tasks, self.group.size)
        answered = 0
        try:
            posted = self._hand_out(tasks, ranks, server, memories)
            mine = [task for task, rank in zip(tasks, ranks, strict=True) if rank == 0]
            # To the end, before anybody is waited for: a process must not stand idle because another one does.
            arrived: dict[int, Reply | Absent] = {
                reply.client: reply for reply in self.inner.run(mine, server, memories, observer)
            }
            for rank, messages in posted.items():
                _settle(rank, messages)
            for task, rank in zip(tasks, ranks, strict=True):
                while task.client not in arrived:  # a process may answer for its clients in any order
                    reply = _reply(rank, server.model.params.device)
                    arrived[reply.client] = reply
                    observer.on_epoch(_report(reply, tasks))
                answered += 1
                yield arrived.pop(task.client)
        finally:
            if answered < len(tasks):
                self.group.leave()  # answers that nobody waits for are under way: there is no next round

    def _hand_out(
        self, tasks: Sequence[Task], ranks: Sequence[int], server: ServerState, memories: Mapping[int, Memory]
    ) -> dict[int, _Posted]:
        model = {"params": server.model.params.cpu(), "buffers": server.model.buffers.cpu()}
        extra = {name: tensor.cpu() for name, tensor in server.extra.items()}
        posted: dict[int, _Posted] = {}
        for rank in sorted(set(ranks) - {0}):
            part = [task for task, owner in zip(tasks, ranks, strict=True) if owner == rank]
            known = {str(task.client): memories[task.client] for task in part if task.client in memories}
            header = {"tasks": [asdict(task) for task in part]}
            posted[rank] = _post(rank, header, {"model": model, "extra": extra, **known})
        return posted


def _report(reply: Reply, tasks: Sequence[Task]) -> EpochReport:
    """One report for all epochs of a client that was trained elsewhere."""
    task = next(task for task in tasks if task.client == reply.client)
    return EpochReport(task, task.steps, reply.samples, reply.metrics)


class _Worker:
    """A follower's work. What fails here is told to the leader in place of a reply."""

    def __init__(self, rank: int, prepare: Prepare) -> None:
        self.rank = rank
        self._prepare = prepare
        self.inner: Backend = _Broken(f"process {rank} has no experiment")
        self.device = torch.device("cpu")

    def prepare(self, header: Mapping[str, Any], tensors: Tensors) -> None:
        shares = [tensors["shares"][str(client)] for client in range(len(tensors["shares"]))]
        try:
            self.inner, self.device = self._prepare(Experiment.parse(header["experiment"]), shares)
        except Exception as error:
            self.inner = _Broken(self._sentence(error))

    def train(self, header: Mapping[str, Any], tensors: Tensors) -> None:
        tasks = [Task(**task) for task in header["tasks"]]
        here = {group: {name: t.to(self.device) for name, t in named.items()} for group, named in tensors.items()}
        server = ServerState(ModelState(**here.pop("model")), here.pop("extra"))
        memories = {int(client): memory for client, memory in here.items()}
        posted: _Posted = []
        try:
            for reply in self.inner.run(tasks, server, memories, Callback()):
                assert isinstance(reply, Reply)  # in this process nobody is absent
                posted += _post_reply(reply)  # the next client begins while this one's reply waits for the leader
        except _Gone:
            raise
        except Exception as error:
            posted += _post(0, {"error": self._sentence(error)}, {})
        _settle(0, posted)

    def _sentence(self, error: Exception) -> str:
        if isinstance(error, FedU2Error):
            return str(error)
        traceback.print_exception(error)  # a bug: only this process can show where
        return f"process {self.rank} failed: {type(error).__name__}: {first_line(error)}"


class _Broken:
    """Stands in for a backend that could not be made; says so when it is needed."""

    def __init__(self, sentence: str) -> None:
        self.sentence = sentence

    def run(self, *_: object) -> Iterator[Reply]:
        raise TrainingError(self.sentence)


def _post_reply(reply: Reply) -> _Posted:
    header = {name: getattr(reply, name) for name in ("client", "examples", "samples")}
    model = {"params": reply.model.params, "buffers": reply.model.buffers}
    tensors = {"model": model, "memory": reply.memory, "payload": reply.payload}
    return _post(0, {**header, "metrics": dict(reply.metrics)}, tensors)


def _reply(rank: int, device: torch.device) -> Reply:
    header, tensors = _receive(rank)
    if "error" in header:
        raise TrainingError(header["error"])
    here = {group: {name: t.to(device) for name, t in named.items()} for group, named in tensors.items()}
    return Reply(**header, model=ModelState(**here["model"]), memory=here["memory"], payload=here["payload"])


def _post(rank: int, header: Mapping[str, Any], tensors: Tensors) -> _Posted:
    """Begin to send a message; `_settle` waits until it is gone."""
    listed = {
        group: [[name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)] for name, tensor in named.items()]
        for group, named in tensors.items()
    }
    head = torch.frombuffer(bytearray(json.dumps([header, listed]).encode()), dtype=torch.uint8)
    parts = [torch.tensor([len(head)]), head]
    parts += [_bytes(tensor.detach().cpu().contiguous()) for named in tensors.values() for tensor in named.values()]
    try:
        return [(dist.isend(part, rank), part) for part in parts if part.numel()]
    except RuntimeError as error:
        raise _lost(rank, error) from None


def _settle(rank: int, posted: _Posted) -> None:
    for work, _ in posted:
        _wait(rank, work)


def _receive(rank: int) -> tuple[dict[str, Any], Tensors]:
    length = _fill(rank, torch.empty(1, dtype=torch.int64))
    head = _fill(rank, torch.empty(int(length), dtype=torch.uint8))
    header, listed = json.loads(head.numpy().tobytes())
    tensors: dict[str, dict[str, Tensor]] = {}
    for group, entries in listed.items():
        tensors[group] = {}
        for name, dtype, shape in entries:
            tensor = torch.empty(shape, dtype=getattr(torch, dtype))
            _fill(rank, _bytes(tensor))
            tensors[group][name] = tensor
    return header, tensors


def _bytes(tensor: Tensor) -> Tensor:
    """A contiguous tensor's bytes, as a view."""
    return tensor.view(-1).view(torch.uint8)


def _fill(rank: int, tensor: Tensor) -> Tensor:
    if tensor.numel():
        try:
            work = dist.irecv(tensor, rank)
        except RuntimeError as error:
            raise _lost(rank, error) from None
        _wait(rank, work)
    return tensor


def _wait(rank: int, work: dist.Work | None) -> None:
    assert work is not None  # only a process outside the group gets none
    try:
        work.wait(TO_ANSWER)
    except RuntimeError as error:
        raise _lost(rank, error) from None


def _lost(rank: int, error: RuntimeError) -> _Gone:
    time.sleep(0.2)  # an interrupt that ended the other process is on its way to this one: let it come first
    if "timed out" in str(error).lower():
        return _Gone(f"process {rank} has not answered for {TO_ANSWER}")
    return _Gone(f"process {rank} has ended unexpectedly")
