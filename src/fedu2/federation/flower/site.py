"""A site: its own images, one task at a time, and a memory that stays with it.

Flower starts a fresh process for every message, so nothing lives here between tasks but what is written down: a
client's memory, in Flower's context, which lasts as long as a run, or in a directory of the site's own, which lasts
longer (`memory=/path` in the node's configuration; memory.py). A memory is kept with the round after which it was
made; a task takes the newest from before its own round, so that a round that is played again begins as it did the
first time.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from fedu2.data import ImageSet, load_dataset, make_partition
from fedu2.engine import choose_device, choose_threads
from fedu2.errors import DataError, UsageError
from fedu2.experiment import Experiment
from fedu2.federation.callbacks import Callback
from fedu2.federation.flower.memory import DiskMemory
from fedu2.federation.flower.wire import Assignment
from fedu2.federation.local import LocalBackend
from fedu2.methods import Memory, Reply, ServerState, build
from fedu2.models.flat import ModelState

__all__ = ["DiskMemory", "Memories", "Site", "site_of"]

log = logging.getLogger("fedu2")

KEPT_CHECKPOINTS = 2  # a server can fall back as far: memories of these rounds are kept


class Memories(Protocol):
    """Where a client's memory lies between rounds."""

    def rounds(self) -> list[int]:
        """After which rounds there is one."""
        ...

    def read(self, round_: int) -> Memory: ...

    def write(self, round_: int, memory: Memory) -> None: ...

    def forget(self, round_: int) -> None: ...


@dataclass(frozen=True, eq=False)
class Site:
    """The images of one client. shares: (n_k,) indices, at the place of the client; others may be empty."""

    name: str
    train: ImageSet
    test: ImageSet
    share: Tensor

    def work(self, assignment: Assignment, memories: Memories) -> Reply:
        """Train as asked, on this machine's device; the memory is written before the reply travels."""
        task = assignment.task
        device = choose_device(assignment.experiment.device)
        if device.type == "cpu":
            torch.set_num_threads(choose_threads(assignment.experiment.engine.threads)[0])
        images = self.train.to(device)
        nobody = torch.empty(0, dtype=torch.int64)
        shares = [nobody] * task.client + [self.share]
        backend = LocalBackend(build(assignment.experiment), images, shares)
        before = _before(task.round, memories)
        known = {} if before is None else {task.client: _to(memories.read(before), device)}
        server = _server_to(assignment, device)
        (reply,) = backend.run([task], server, known, Callback())
        if reply.memory:
            if before is None and task.round > 1:
                log.warning("site %s remembers nothing from before round %d: it begins anew", self.name, task.round)
            memories.write(task.round, reply.memory)
            # A server that is set back needs what was the newest then, however long ago that was made.
            oldest = _before(task.round - KEPT_CHECKPOINTS * assignment.experiment.checkpoint_every + 1, memories)
            for made in memories.rounds():
                # Those of later rounds belong to a future that a server which was set back does not have.
                if made > task.round or (oldest is not None and made < oldest):
                    memories.forget(made)
        return reply


def site_of(experiment: Experiment, node: Mapping[str, Any]) -> Site:
    """The site that a node's configuration describes: `data=/path` for its own images, or `partition-id=3`."""
    if "data" in node:
        options = experiment.data.model_copy(update={"root": str(node["data"]), "layout": "images"})
        dataset = load_dataset("folder", options)
        share = torch.arange(len(dataset.train))
        return Site(str(node["site"]), dataset.train, dataset.test, share)
    if "partition-id" not in node:
        raise UsageError("a node says where its images are: --node-config \"data='/path/to/images'\"")
    number = int(node["partition-id"])
    dataset = load_dataset(experiment.dataset, experiment.data)
    shares = make_partition(dataset, experiment)
    if not 0 <= number < len(shares):
        raise DataError(f"partition-id={number}: the experiment has {len(shares)} clients")
    return Site(f"partition-{number}", dataset.train, dataset.test, shares[number])


def _before(round_: int, memories: Memories) -> int | None:
    return max((made for made in memories.rounds() if made < round_), default=None)


def _to(memory: Memory, device: torch.device) -> Memory:
    return {name: tensor.to(device) for name, tensor in memory.items()}


def _server_to(assignment: Assignment, device: torch.device) -> ServerState:
    server = assignment.server
    model = ModelState(server.model.params.to(device), server.model.buffers.to(device))
    return ServerState(model, _to(server.extra, device))
