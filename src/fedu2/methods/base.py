"""What a method is: an objective, regularisers, an aggregator, and what a client remembers.

`Method` composed of an objective and FedAvg is FedSimCLR, FedSimSiam or FedBYOL. FedU² adds a regulariser and swaps the
aggregator. A method that needs more overrides one of the few functions below; none of them knows of devices,
processes or networks, which are a backend's business.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor

from fedu2.aggregators import Aggregator, Updates
from fedu2.experiment import Experiment
from fedu2.models import build_encoder
from fedu2.models.flat import FlatModel, Layout, ModelState
from fedu2.objectives import Objective, Outcome, objectives
from fedu2.objectives.heads import rotation_head
from fedu2.regularizers.rotation import rotation_loss
from fedu2.seeds import derive

__all__ = [
    "Batch",
    "Learner",
    "Memory",
    "Method",
    "Regularizer",
    "Reply",
    "ServerState",
    "Task",
]

Memory = Mapping[str, Tensor]
"""What a client keeps between rounds: named tensors, nothing hidden."""


Learner = FlatModel[Objective]
"""An objective with its networks, as flat vectors."""


class Regularizer(Protocol):
    """A term ℓ_u that is added to the objective's loss."""

    def __call__(
        self, outcome: Outcome, generator: torch.Generator, progress: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The weighted term, and what to log (scalars). progress: `Batch.progress`, for weights that change."""
        ...


@dataclass(frozen=True)
class Task:
    """One client's work in one round. Its randomness depends on (seed, round, client) and on nothing else."""

    round: int  # from 1; 0 in the prelude
    client: int
    steps: int
    lr: float
    progress: float  # share of rounds that are over, in [0, 1)


@dataclass(frozen=True)
class Batch:
    """What a client trains on in one step: two views (N, 3, S, S) of the same images.

    other: a view of N other images of the client, drawn at random, for methods that want them.
    progress: share of rounds that are over, (), in [0, 1); on the device, where a captured step finds the current one.
    """

    view1: Tensor
    view2: Tensor
    other: Tensor | None = None
    progress: Tensor = field(default_factory=lambda: torch.zeros(()))


@dataclass(frozen=True)
class ServerState:
    """What the server holds between rounds: the global model θ_g, and named tensors of the method's own."""

    model: ModelState
    extra: Memory = field(default_factory=dict)


@dataclass(frozen=True)
class Reply:
    """What a client gives back after local training. `model` and `payload` travel; `memory` stays at the client."""

    client: int
    examples: int  # n_k, the images that the client holds
    samples: int  # images trained on in this round, with repetition
    model: ModelState
    memory: Memory
    metrics: Mapping[str, float]
    payload: Memory = field(default_factory=dict)


@dataclass(frozen=True)
class Method:
    """One federated method, fully composed.

    stays: sections of the model that never travel; each client keeps its own (FedBYOL's target network), but for a
        target that begins every round afresh (`byol.target=fresh`).
    scratch: sections that neither travel nor are remembered; `receive` makes them anew (FedX's teacher).
    prelude: steps at learning rate 0 of every client before the first round, for what `prepare` begins with.
    wants_others: each step also sees a view of other images of the client, `Batch.other`.
    least_spread: of projections, below which no healthy run of the method was seen (`fedu2.evaluation.alarm`).
    """

    experiment: Experiment
    aggregator: Aggregator
    regularizers: Sequence[Regularizer] = ()
    stays: tuple[str, ...] = ()
    scratch: tuple[str, ...] = ()
    prelude: int = 0
    wants_others: bool = False
    least_spread: float = 0.02

    def learner(self) -> Objective:
        """A freshly initialised objective with its networks, the same for everybody: it depends on the seed alone."""
        experiment = self.experiment
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derive(experiment.seed, "initial weights"))
            encoder = build_encoder(experiment.encoder, experiment.width)
            learner = objectives[experiment.objective or "byol"](encoder, experiment)
            if experiment.rotation.weight:
                learner.rotation = rotation_head(encoder, experiment.heads)
        return learner

    @cached_property
    def layouts(self) -> tuple[Layout, Layout]:
        """Where each parameter and each buffer lies in what travels."""
        model = FlatModel(self.learner())
        left_out = (*self.stays, *self.scratch)
        return model.layout.prefix(left_out), model.buffer_layout.prefix(left_out)

    @property
    def remembered(self) -> tuple[str, ...]:
        """The sections that stay and that a client keeps between rounds."""
        fresh = self.experiment.byol.target == "fresh"
        return tuple(name for name in self.stays if not (fresh and name == "target"))

    @cached_property
    def _beginnings(self) -> Memory:
        """The sections that stay, freshly initialised, the same for everybody."""
        model = FlatModel(self.learner())
        sections = {name: model.section(name) for name in self.remembered}
        params = {f"{name}.params": section.params.clone() for name, section in sections.items()}
        return {**params, **{f"{name}.buffers": section.buffers.clone() for name, section in sections.items()}}

    @cached_property
    def trained(self) -> int:
        """How many leading parameters of what travels are trained; the others are a target network's."""
        return min(len(FlatModel(self.learner()).trained), self.layouts[0].size)

    @property
    def travelling(self) -> tuple[int, int]:
        """How many leading parameters and buffers travel."""
        return self.layouts[0].size, self.layouts[1].size

    def receive(self, model: Learner, server: ServerState, memory: Memory | None, task: Task) -> None:
        """Client: take the global model in. Remembered sections come from memory; at first sight they are freshly made,
        or what `Objective.start` derives from what has arrived, as it does in every round with a fresh target.

        Write into the model's tensors (`copy_`), never put others in their place: a captured `loss` reads the former.
        """
        model.load(server.model)
        kept = self._beginnings if memory is None else memory
        for name in self.remembered:
            section = model.section(name)
            section.params.copy_(kept[f"{name}.params"])
            section.buffers.copy_(kept[f"{name}.buffers"])
        if self.stays and (memory is None or self.remembered != self.stays):
            model.module.start()

    def loss(self, learner: Objective, batch: Batch, generator: torch.Generator) -> tuple[Tensor, dict[str, Tensor]]:
        """Client: L = ℓ_a + Σ weighted regularisers (+ rotation), and its terms to log.

        On a GPU this is run a few times, then captured and replayed: every step must launch the same kernels on the
        same memory. No Python counters, no values read on the host, no randomness but `generator`'s. Weights of
        convolutions and linear layers may be half-precision copies in here.
        """
        outcome = self.outcome(learner, batch, generator)
        total, terms = outcome.loss, {"align": outcome.loss.detach(), **outcome.terms}
        for regularizer in self.regularizers:
            term, logged = regularizer(outcome, generator, batch.progress)
            total = total + term
            terms.update(logged)
        if weight := self.experiment.rotation.weight:
            term = rotation_loss(learner, batch.view1, generator)
            total = total + weight * term
            terms["rotation"] = term.detach()
        return total, {"loss": total.detach(), **terms}

    def outcome(self, learner: Objective, batch: Batch, generator: torch.Generator) -> Outcome:
        """Client: the objective's loss ℓ_a, with the representations that regularisers act on."""
        return learner(batch.view1, batch.view2)  # type: ignore[no-any-return]

    def payload(self, model: Learner, task: Task) -> Memory:
        """Client: what travels to the server beside the model."""
        return {}

    def remember(self, model: Learner, server: ServerState, memory: Memory | None, task: Task) -> Memory:
        """Client: what to keep for the next time; `server` and `memory` are what `receive` was given."""
        kept: dict[str, Tensor] = {}
        for name in self.remembered:
            section = model.section(name)
            kept[f"{name}.params"], kept[f"{name}.buffers"] = section.params.clone(), section.buffers.clone()
        return kept

    def notes(self, model: Learner, server: ServerState, memory: Memory | None, task: Task) -> dict[str, float]:
        """Client: figures to log beside the terms of the loss; `server` and `memory` as in `remember`."""
        return {}

    def prepare(self, server: ServerState, payloads: Sequence[Memory]) -> ServerState:
        """Server: what to begin with, from the payloads of the prelude; the model stays as it is."""
        return server

    def doubts(self, payload: Memory) -> str | None:
        """Server: why a payload that anybody may have sent cannot be one, in a few words; None where it can.

        A method that has a `payload` says here what it must be; of others none is taken.
        """
        return "it sends a payload, and the method has none" if payload else None

    def aggregate(
        self, server: ServerState, updates: Updates, payloads: Sequence[Memory]
    ) -> tuple[ServerState, dict[str, Any]]:
        """Server: the next global model from the clients' parameters, buffers and payloads; and what to log."""
        result = self.aggregator(updates)
        buffers = server.model.buffers if result.buffers is None else result.buffers
        if result.buffers is None and updates.buffers is not None and len(buffers):
            buffers = result.buffer_weights.to(buffers) @ updates.buffers.clients
        return replace(server, model=ModelState(result.params, buffers)), result.metrics
