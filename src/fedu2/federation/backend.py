"""The seam between *what* clients compute (a method) and *how* they are executed (a backend)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from fedu2.methods import Memory, Reply, ServerState, Task

__all__ = ["Absent", "Backend", "EpochReport", "Observer", "bytes_a_parameter", "trusts"]


@dataclass(frozen=True)
class EpochReport:
    """What a client tells while it trains."""

    task: Task
    steps: int  # done so far, of task.steps
    samples: int  # trained since the last report
    terms: Mapping[str, float]  # means since the last report


@dataclass(frozen=True)
class Absent:
    """A client that gave no valid reply in this round, and why."""

    client: int
    reason: str


class Observer(Protocol):
    """Listens to training; see `fedu2.federation.callbacks`."""

    def on_tasks(self, tasks: Sequence[Task]) -> None: ...

    def on_epoch(self, report: EpochReport) -> None: ...


class Backend(Protocol):
    """Executes clients: in process on one device, on several, or on other machines.

    A backend whose clients are not our own says so with an attribute `trusted = False`: what they send is inspected
    before it counts. From our own, a model that is not finite is a failure that must not be papered over. With an
    attribute `half = True` it says that parameters travel in half precision.
    """

    def run(
        self, tasks: Sequence[Task], server: ServerState, memories: Mapping[int, Memory], observer: Observer
    ) -> Iterator[Reply | Absent]:
        """Train every task from the same server state; for each there is an answer, as it is ready, in any order."""
        ...


def bytes_a_parameter(backend: Backend) -> int:
    """On the way to a client and back."""
    return 2 if getattr(backend, "half", False) else 4


def trusts(backend: Backend) -> bool:
    """Whether a backend's clients are our own."""
    return bool(getattr(backend, "trusted", True))
