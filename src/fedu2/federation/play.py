"""A federation at play: round after round, judged and written down, from the first or from a checkpoint."""

from __future__ import annotations

import contextlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from fedu2.errors import TrainingError, UsageError
from fedu2.evaluation.alarm import Sign, attainable, collapsed, first_signs, floors, sentence
from fedu2.federation.backend import Backend
from fedu2.federation.callbacks import Callback
from fedu2.federation.checkpoint import Checkpoints
from fedu2.federation.deadline import Deadline
from fedu2.federation.rounds import FederationState, initial_state, play_round
from fedu2.interrupts import uninterrupted
from fedu2.methods import Method, ServerState
from fedu2.models.flat import FlatModel
from fedu2.objectives import Objective
from fedu2.resuming import check_keys
from fedu2.rundir import RunDirectory

__all__ = ["Federation", "Judge", "summarise"]

log = logging.getLogger("fedu2")

Clients = Callable[[], Sequence[int] | Mapping[int, int]]
"""Before a round: how many images each client has that can be had."""

Judge = Callable[[Objective, ServerState, int], dict[str, float]]
"""Figures of the global model after a round."""


class Federation:
    """A run in progress: plays rounds, evaluates, and writes everything down."""

    def __init__(
        self,
        method: Method,
        backend: Backend,
        clients: Clients,
        judge: Judge,
        directory: RunDirectory,
        watch: Callback,
        device: torch.device,
    ) -> None:
        self.method = method
        self.backend = backend
        self.clients = clients
        self.judge = judge
        self.experiment = method.experiment
        self.directory = directory
        self.watch = watch
        self.device = device
        self.global_model = FlatModel(method.learner(), device)
        features = int(getattr(self.global_model.module.encoder, "features", 0))
        self.floors = floors(features, self.experiment.heads.out or features, method.least_spread)
        self.alarmed: set[str] = set()  # figures whose fall was told
        self.checkpoints = Checkpoints(directory.path / "checkpoint", *method.layouts)
        self.saved = 0  # the round of the last checkpoint
        self.unsaved: list[dict[str, Any]] = []  # records of the rounds since then

    def play(
        self, resume: bool, begin: Callable[[], None], deadline: Deadline, surroundings: Mapping[str, Any]
    ) -> None:
        """All rounds that are still to be played, or as many as there is time for; `begin` makes a new run's files.

        surroundings: what the summary tells beside the figures.
        """
        state = self._resumed() if resume else None
        if state is None:
            begin()
            state = initial_state(self.method, self.device)
        self.watch.on_start(self.experiment, self.directory.path, state.round)
        try:
            if state.round == 0:
                self.unsaved = [self._measured(state, {"round": 0})]
                self.floors = attainable(self.floors, self.unsaved)
                self._tell(self.unsaved[0])
            deadline.start()
            while state.round < self.experiment.rounds and not deadline.reached():
                state = self._round(state)
                deadline.lap()
            if state.round < self.experiment.rounds:
                self._save(state)
            else:
                self.watch.on_end(self._summarise(surroundings))
        except (TrainingError, KeyboardInterrupt) as error:
            with contextlib.suppress(TrainingError, RuntimeError):  # the disk may be full, the device lost
                self._save(state)
            if isinstance(error, KeyboardInterrupt):
                raise
            raise TrainingError(f"{error}; {self._last_good()}") from None
        finally:
            self.watch.close()

    def _resumed(self) -> FederationState | None:
        """The state of the last whole checkpoint, if there is one yet."""
        metrics = self.directory.path / "metrics.jsonl"
        found = self.checkpoints.latest(self.device, spare=metrics)
        if found is None:
            played = max((record["round"] for record in self.directory.history()), default=0)
            kept = self.directory.config()
            if played >= min(kept.checkpoint_every, kept.rounds):  # a round is told of after its checkpoint
                raise TrainingError(f"{self.directory.path} has played {played} rounds, but its checkpoint is gone")
            if played:
                log.warning("%s ended before its first checkpoint; it begins anew", self.directory.path)
            self.directory.write_history([])
            return None
        state, begun, place = found
        check_keys(self.experiment, begun, self.directory.path)
        if state.round > self.experiment.rounds:
            raise UsageError(f"rounds={self.experiment.rounds} is fewer than {place} has played: {state.round}")
        self.directory.write_config(self.experiment)
        records = self.directory.restore_history(self.checkpoints.records(place, metrics), state.round)
        self.alarmed, self.floors = set(first_signs(records)), attainable(self.floors, records)
        self.checkpoints.journal.begin(metrics.read_bytes())
        self.saved = state.round
        return state

    def _round(self, state: FederationState) -> FederationState:
        began = time.perf_counter()
        state, record = play_round(state, self.method, self.backend, self.clients(), self.watch)
        seconds = time.perf_counter() - began
        record["seconds"] = seconds
        record["samples_per_second"] = record.pop("samples") / seconds
        every = self.experiment.evaluation.every
        if state.round == self.experiment.rounds or (every and state.round % every == 0):
            record = self._measured(state, record)
            state = state.judged(record["knn"]) if "knn" in record else state
        record |= self._alarm(record)
        self.unsaved.append(record)
        if state.round % self.experiment.checkpoint_every == 0 or state.round == self.experiment.rounds:
            self._save(state)
        self._tell(record)
        return state

    def _save(self, state: FederationState) -> None:
        if state.round <= self.saved:
            return
        with uninterrupted():  # else rounds might be kept twice, or be taken for unsaved
            self.directory.check_lock()
            played = [record for record in self.unsaved if record["round"] <= state.round]
            self.checkpoints.save(state, self.experiment.flat(), played, self.directory.data)
            self.unsaved = self.unsaved[len(played) :]
            self.saved = state.round

    def _measured(self, state: FederationState, record: dict[str, Any]) -> dict[str, Any]:
        began = time.perf_counter()
        self.global_model.load(state.server.model)
        try:
            judged = self.judge(self.global_model.module, state.server, state.round)
        except TrainingError as error:
            raise TrainingError(f"after round {state.round} {error}") from None
        return record | judged | {"evaluation_seconds": time.perf_counter() - began}

    def _alarm(self, record: Mapping[str, Any]) -> dict[str, Any]:
        """What of a round points to a collapse, for its record; told aloud when it begins."""
        low = collapsed(record, self.floors)
        for name in (name for name in low if name not in self.alarmed):
            log.warning("%s", sentence(name, Sign(record["round"], low[name], 1), self.floors[name]))
        self.alarmed |= low.keys()
        return {"collapse": low} if low else {}

    def _tell(self, record: Mapping[str, Any]) -> None:
        """Of a round; after its checkpoint, so that a line without one means that none was due yet."""
        self.directory.append(record)
        self.watch.on_round(record)

    def _summarise(self, surroundings: Mapping[str, Any]) -> dict[str, Any]:
        summary = {**summarise(self.directory.history()), "experiment": self.experiment.flat(), **surroundings}
        self.directory.write_summary(summary)
        return summary

    def _last_good(self) -> str:
        found = self.checkpoints.latest("cpu")
        return f"the last good checkpoint is {found[2]}" if found else "there is no checkpoint yet"


def _counted(history: Sequence[Mapping[str, Any]], name: str) -> dict[str, dict[str, int]]:
    """How often each client was left out, or bounded, and for which reason: client → reason → rounds."""
    counts: dict[str, Counter[str]] = {}
    for record in history:
        for client, reasons in record.get(name, {}).items():
            counts.setdefault(client, Counter()).update([reasons] if isinstance(reasons, str) else reasons)
    return {client: dict(counts[client]) for client in sorted(counts, key=int)}


def summarise(history: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The figures that a reader wants first: last and best round, the untrained encoder, time and speed."""
    measured = [record for record in history if "effective_rank" in record]
    trained = [record for record in history if record["round"] > 0]
    last = measured[-1] if measured else {}
    summary: dict[str, Any] = {"rounds": max((record["round"] for record in history), default=0)}
    for name in ("knn", "effective_rank", "projector_rank", "alignment", "uniformity"):
        if name in last:
            summary[name] = last[name]
            if measured[0]["round"] == 0:
                summary[f"untrained_{name}"] = measured[0].get(name)
    if "knn" in last:
        best = max(measured, key=lambda record: record["knn"])
        summary["best"] = {"round": best["round"], "knn": best["knn"]}
    if trained:
        for name in ("loss", "align", "fur.mass", "fur.gap"):
            if name in trained[-1]:
                summary[name] = trained[-1][name]
        seconds = [record["seconds"] for record in trained]
        samples = [record["seconds"] * record["samples_per_second"] for record in trained]
        summary["seconds"] = sum(seconds)
        summary["samples_per_second"] = sum(samples) / sum(seconds)
    if signs := first_signs(trained):
        summary["collapse"] = {name: sign._asdict() for name, sign in signs.items()}
    for name in ("left_out", "bounded"):
        if counts := _counted(trained, name):
            summary[name] = counts
    return summary
