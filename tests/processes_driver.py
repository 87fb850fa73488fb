"""Train by the library, as a script under torchrun would: CONFIG OUT [FAULT]. See test_processes.py.

FAULT happens in round 2, in the last process: nan (its clients receive a broken model), bug (a ValueError), killed
(kill -9, while the others train); or in the first: interrupted.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch

import fedu2
from fedu2.errors import FedU2Error
from fedu2.experiment import Experiment
from fedu2.federation.backend import Observer
from fedu2.federation.local import LocalBackend
from fedu2.methods import Memory, Reply, ServerState, Task
from fedu2.models.flat import ModelState

CONFIG, OUT, FAULT = (*sys.argv[1:], "")[:3]
RANK, LAST = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1)) - 1


class Faulty(LocalBackend):
    """The clients of this process, with the fault that was asked for."""

    def run(
        self, tasks: Sequence[Task], server: ServerState, memories: Mapping[int, Memory], observer: Observer
    ) -> Iterator[Reply]:
        print("trained here:", [task.client for task in tasks], file=sys.stderr)
        if tasks[0].round == 2:
            server = _with_fault(server)
        return super().run(tasks, server, memories, observer)


def _with_fault(server: ServerState) -> ServerState:
    if RANK == LAST and FAULT == "nan":
        return replace(server, model=ModelState(server.model.params * torch.nan, server.model.buffers))
    if RANK == LAST and FAULT == "bug":
        raise ValueError("no such thing\nand more of it")
    if RANK == LAST and FAULT == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if RANK == 0 and FAULT == "interrupted":
        os.kill(os.getpid(), signal.SIGINT)
    return server


if __name__ == "__main__":
    try:
        fedu2.train(Experiment.load(CONFIG), OUT, backend=Faulty)
    except FedU2Error as error:
        print(f"fedu2: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        print("fedu2: interrupted", file=sys.stderr)
        sys.exit(130)
