"""One round: draw clients, train them, aggregate. A pure step from one explicit state to the next."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from fedu2.aggregators import Buffers, Updates, agreement
from fedu2.defence import Arrivals, bounded, inspected, misfit, selected
from fedu2.defence.bounds import claims, claims_limit
from fedu2.errors import TrainingError
from fedu2.experiment import Experiment
from fedu2.federation.backend import Absent, Backend, Observer, bytes_a_parameter, trusts
from fedu2.federation.batches import steps_of
from fedu2.federation.optimizers import learning_rate
from fedu2.federation.server_step import ahead, options_at, step
from fedu2.methods import Memory, Method, Reply, ServerState, Task
from fedu2.models.flat import FlatModel, ModelState
from fedu2.seeds import generator

log = logging.getLogger("fedu2")

__all__ = ["Best", "FederationState", "as_sent", "initial_state", "participants", "play_round"]


@dataclass(frozen=True)
class Best:
    """The global model of the round with the highest kNN accuracy so far; the first of equals."""

    round: int
    knn: float
    model: ModelState


@dataclass(frozen=True)
class FederationState:
    """All that a federation carries from round to round; resuming is reading it."""

    round: int  # rounds played so far
    server: ServerState  # with θ_g, the model that is judged; what is sent may lie ahead of it (`server_step`)
    memories: Mapping[int, Memory] = field(default_factory=dict)  # of the clients that have taken part
    best: Best | None = None  # of the rounds that were judged by kNN
    seen: Mapping[int, tuple[str, ...]] = field(default_factory=dict)  # the last models of clients that are not ours
    velocity: Tensor | None = None  # (P,) v of the server's step, where that is longer than 1 or has momentum

    def judged(self, knn: float) -> FederationState:
        """The same after its global model was judged."""
        if self.best is not None and knn <= self.best.knn:
            return self
        return replace(self, best=Best(self.round, knn, self.server.model))


def initial_state(method: Method, device: torch.device | str) -> FederationState:
    """Round 0: the untrained global model, and clients that remember nothing."""
    model = FlatModel(method.learner(), device)
    return FederationState(0, ServerState(model.state(*method.travelling)))


def participants(experiment: Experiment, clients: int, round_: int) -> list[int]:
    """The clients of a round, in ascending order: a share `participation` of them, and at least one."""
    count = max(1, round(experiment.participation * clients))
    drawn = torch.randperm(clients, generator=generator("cpu", experiment.seed, "participants", round_))
    return sorted(drawn[:count].tolist())


def play_round(
    state: FederationState,
    method: Method,
    backend: Backend,
    examples: Sequence[int] | Mapping[int, int],
    observer: Observer,
) -> tuple[FederationState, dict[str, Any]]:
    """Play one round over clients with `examples` images each; the next state, and what to log of it.

    A mapping of clients to images names those that can be had; else all can. Clients that give no valid reply are left
    out, as long as there are `flower.min_replies`.
    """
    examples = examples if isinstance(examples, Mapping) else dict(enumerate(examples))
    clients = sorted(examples)
    before: dict[str, int] = {}
    earlier: dict[int, str] = {}
    if state.round == 0 and method.prelude:
        state, before, earlier = _prelude(state, method, backend, clients, observer)
    experiment, round_ = method.experiment, state.round + 1
    state = as_sent(state, method)
    drawn = [clients[place] for place in participants(experiment, len(clients), round_)]
    steps = _steps(examples, experiment, trusts(backend))
    lr = learning_rate(experiment, round_)
    progress = (round_ - 1) / experiment.rounds
    tasks = [Task(round_, client, steps[client], lr, progress) for client in drawn]
    observer.on_tasks(tasks)

    start, trusted, seen = state.server.model, trusts(backend), state.seen
    layout, buffer_layout = method.layouts
    arrivals, absent = _arrivals(tasks, state, method, backend, observer)
    memories = {**state.memories, **{r.client: r.memory for r in arrivals.replies if r.memory}}
    if not trusted:
        arrivals, refused, seen = inspected(arrivals, start, buffer_layout, seen)
        absent |= refused
    _require_enough(len(arrivals.replies), absent, round_, experiment)
    work = _work(state.server, arrivals.replies, bytes_a_parameter(backend))  # of those that are outvoted, too
    arrivals, held = bounded(arrivals, start, experiment.defence, trusted)
    arrivals, outvoted = selected(arrivals, start, experiment.defence)
    _tell_defence(held, outvoted, round_)

    replies = arrivals.replies
    beside = Buffers(start.buffers, arrivals.buffers, buffer_layout)
    shares = _shares(replies, experiment)
    updates = Updates(start.params, arrivals.params, shares, beside, layout, round_, method.trained)
    together = agreement(updates)
    server, logged = method.aggregate(state.server, updates, [reply.payload for reply in replies])
    options = options_at(experiment.server, round_, experiment.rounds)
    params, velocity = step(start.params, server.model.params, state.velocity, options, method.trained)
    server = replace(server, model=replace(server.model, params=params))
    after = replace(state, round=round_, server=server, memories=memories, seen=seen, velocity=velocity)
    complaint = f"the global model is not finite after round {round_}: lower optimizer.lr or server.lr"
    _check_finite(as_sent(after, method).server.model, complaint)
    record = {"round": round_, "lr": lr, "clients": [reply.client for reply in replies], **_means(replies)}
    record |= {name: value + before.get(name, 0) for name, value in work.items()}
    record |= {name if "." in name else f"{experiment.aggregator}.{name}": value for name, value in logged.items()}
    if together is not None:
        record["agreement"] = together
    record["client_loss"] = [reply.metrics["loss"] for reply in replies]
    if left_out := _joined(earlier, absent | outvoted):
        record["left_out"] = {str(client): reason for client, reason in sorted(left_out.items())}
    if held:
        record["bounded"] = {str(client): reasons for client, reasons in sorted(held.items())}
    return after, record


def as_sent(state: FederationState, method: Method) -> FederationState:
    """The state with θ_s, which clients are sent, in the place of θ_g."""
    model, experiment = state.server.model, method.experiment
    options = options_at(experiment.server, state.round, experiment.rounds)
    part = method.layouts[0].span("encoder") if options.parts == "encoder" else slice(method.trained)
    params = ahead(model.params, state.velocity, options, part)
    return replace(state, server=replace(state.server, model=replace(model, params=params)))


def _arrivals(
    tasks: Sequence[Task], state: FederationState, method: Method, backend: Backend, observer: Observer
) -> tuple[Arrivals, dict[int, str]]:
    """The replies, in the order of the tasks, with their models as rows of two matrices; and who sent none, and why."""
    start, trusted = state.server.model, trusts(backend)
    params = start.params.new_empty(len(tasks), len(start.params))  # (K, P)
    buffers = start.buffers.new_empty(len(tasks), len(start.buffers))  # (K, Q)
    rows = {task.client: row for row, task in enumerate(tasks)}
    replies: list[Reply | None] = [None] * len(tasks)
    absent: dict[int, str] = {}
    for reply in backend.run(tasks, state.server, state.memories, observer):
        if reason := _no_reply(reply, start, method, trusted):
            absent[reply.client] = reason
            continue
        assert isinstance(reply, Reply)
        if trusted:
            complaint = f"the model of client {reply.client} is not finite after round {tasks[0].round}"
            _check_finite(reply.model, complaint)
        row = rows[reply.client]
        params[row], buffers[row] = reply.model.params, reply.model.buffers
        replies[row] = replace(reply, model=start)  # its own vectors are in the matrix now: do not hold them twice
    present = [row for row, reply in enumerate(replies) if reply]
    if len(present) < len(tasks):
        params, buffers = params[present], buffers[present]
    return Arrivals([reply for reply in replies if reply], params, buffers), absent


def _no_reply(answer: Reply | Absent, start: ModelState, method: Method, trusted: bool) -> str | None:
    """Why an answer is no valid reply; of clients that are not trusted, only what is one from start to end is."""
    if isinstance(answer, Absent):
        return answer.reason
    return None if trusted else misfit(answer, start, method)


def _steps(examples: Mapping[int, int], experiment: Experiment, trusted: bool) -> dict[int, int]:
    """The steps of each client; who claims more images than is believed does not set the pace of the others."""
    images = list(examples.values())
    limit = claims_limit(experiment.defence, trusted)
    over = claims(images, limit) if limit else {}
    largest = max((over.get(place, claimed) for place, claimed in enumerate(images)), default=None)
    return dict(zip(examples, steps_of(images, experiment, largest), strict=True))


def _tell_defence(held: Mapping[int, Sequence[str]], outvoted: Mapping[int, str], round_: int) -> None:
    for client, reasons in sorted(held.items()):
        log.warning("client %d is bounded in round %d: %s", client, round_, "; ".join(reasons))
    for client, reason in sorted(outvoted.items()):  # a rule that is built for f clients leaves out f, hostile or not
        log.info("client %d is left out of round %d: %s", client, round_, reason)


def _prelude(
    state: FederationState, method: Method, backend: Backend, clients: Sequence[int], observer: Observer
) -> tuple[FederationState, dict[str, int], dict[int, str]]:
    """Round 0 of methods that have one: nothing is learned, the clients keep their models.

    The state after it, what it took, and who was left out, and why.
    """
    drawn = [clients[place] for place in participants(method.experiment, len(clients), 0)]
    tasks = [Task(0, client, method.prelude, 0.0, 0.0) for client in drawn]
    observer.on_tasks(tasks)
    answers = {answer.client: answer for answer in backend.run(tasks, state.server, {}, observer)}
    start, trusted = state.server.model, trusts(backend)
    reasons = {client: _no_reply(answer, start, method, trusted) for client, answer in answers.items()}
    absent = {client: reason for client, reason in reasons.items() if reason}
    replies = [answer for client in drawn if client not in absent and isinstance(answer := answers[client], Reply)]
    _require_enough(len(replies), absent, 0, method.experiment)
    server = method.prepare(state.server, [reply.payload for reply in replies])
    left_out = {client: f"before round 1: {reason}" for client, reason in absent.items()}
    return (
        replace(state, server=server),
        _work(state.server, replies, bytes_a_parameter(backend), models=False),
        left_out,
    )


def _joined(earlier: Mapping[int, str], now: Mapping[int, str]) -> dict[int, str]:
    """Reasons by client; those of a client that has two are one."""
    both = {client: f"{reason}; {now[client]}" for client, reason in earlier.items() if client in now}
    return {**earlier, **now, **both}


def _require_enough(replies: int, absent: Mapping[int, str], round_: int, experiment: Experiment) -> None:
    """Tell who is left out; stop where too few are left."""
    for client, reason in sorted(absent.items()):
        log.warning("client %d is left out of round %d: %s", client, round_, reason)
    least = max(1, min(experiment.flower.min_replies, replies + len(absent)))
    if replies < least:
        said = "; ".join(f"client {client}: {reason}" for client, reason in sorted(absent.items()))
        raise TrainingError(f"round {round_} has {replies} valid replies, fewer than {least} ({said})")


def _work(server: ServerState, replies: Sequence[Reply], parameter: int, models: bool = True) -> dict[str, int]:
    """Images trained on, and bytes that travelled to all clients and back, there with their models or without.

    parameter: bytes of one.
    """

    def size(*tensors: Tensor) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    model = parameter * server.model.params.numel() + size(server.model.buffers)
    return {
        "samples": sum(reply.samples for reply in replies),
        "bytes_down": len(replies) * (model + size(*server.extra.values())),
        "bytes_up": sum(model * models + size(*reply.payload.values()) for reply in replies),
    }


def _check_finite(model: ModelState, complaint: str) -> None:
    if not bool(model.params.isfinite().all() and model.buffers.isfinite().all()):
        raise TrainingError(complaint)


def _shares(replies: Sequence[Reply], experiment: Experiment) -> Tensor:
    """Weights of the participating clients, n_k/n or 1/K, as (K,) float64."""
    sizes = [reply.examples if experiment.client_weights == "size" else 1 for reply in replies]
    weights = torch.tensor(sizes, dtype=torch.float64)
    return weights / weights.sum()


def _means(replies: Sequence[Reply]) -> dict[str, float]:
    """Each term's mean over clients, weighted by their images."""
    total = sum(reply.examples for reply in replies)
    names = dict.fromkeys(name for reply in replies for name in reply.metrics)
    return {name: sum(r.metrics.get(name, 0.0) * r.examples for r in replies) / total for name in names}
