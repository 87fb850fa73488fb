"""Clients that mean harm: a backend that turns some replies of another one into attacks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch

from fedu2.federation.backend import Backend, Observer
from fedu2.methods import Memory, Reply, ServerState, Task
from fedu2.models.flat import ModelState
from fedu2.seeds import generator

Attack = Callable[[Reply, ModelState, Sequence[Reply], int], Reply]
"""From the attacker's own honest reply, what was sent out, the honest clients' replies (attackers know all), and the
round: what is sent."""


def _away(model: ModelState, start: ModelState, factor: float) -> ModelState:
    """The update `factor` times as long."""
    return ModelState(
        start.params + factor * (model.params - start.params), start.buffers + factor * (model.buffers - start.buffers)
    )


def sign_flip(reply: Reply, start: ModelState, honest: Sequence[Reply], round_: int) -> Reply:
    """The opposite of what was learned; the buffers stay as they are, for variances below zero would be refused."""
    return replace(reply, model=ModelState(2 * start.params - reply.model.params, reply.model.buffers))


def scale(reply: Reply, start: ModelState, honest: Sequence[Reply], round_: int) -> Reply:
    """A thousand times what was learned."""
    longer = _away(reply.model, start, 1000.0)
    return replace(reply, model=ModelState(longer.params, longer.buffers.clamp_min(0)))


def noise(reply: Reply, start: ModelState, honest: Sequence[Reply], round_: int) -> Reply:
    """Gaussian noise, as long as the update in its place."""
    random = generator("cpu", reply.client, "attack", round_)
    drawn = torch.randn(len(start.params), generator=random).to(start.params)
    length = (reply.model.params - start.params).norm()
    return replace(reply, model=ModelState(start.params + drawn * (length / drawn.norm()), reply.model.buffers))


def tiny(reply: Reply, start: ModelState, honest: Sequence[Reply], round_: int) -> Reply:
    """A thousandth of the honest clients' mean update, reversed: what EUA as published gives nearly all weight to."""
    mean = torch.stack([other.model.params - start.params for other in honest]).mean(0)
    own = 1e-3 * (1 + reply.client / 100)  # so that no two attackers send the same
    return replace(reply, model=ModelState(start.params - own * mean, reply.model.buffers))


def claim(reply: Reply, start: ModelState, honest: Sequence[Reply], round_: int) -> Reply:
    """The opposite of what was learned, on a thousand million images: weight that a word can buy."""
    return replace(sign_flip(reply, start, honest, round_), examples=10**9)


def collude(reply: Reply, start: ModelState, honest: Sequence[Reply], round_: int) -> Reply:
    """All attackers alike: the honest clients' mean update, reversed, twice as long as their median one."""
    updates = torch.stack([other.model.params - start.params for other in honest])
    mean, own = updates.mean(0), 1 + 1e-4 * reply.client  # so that no two are the same to the bit
    away = mean * (own * 1.99 * updates.norm(dim=1).median() / mean.norm())
    buffers = start.buffers + own * (honest[0].model.buffers - start.buffers)
    return replace(reply, model=ModelState(start.params - away, buffers.clamp_min(0)))


ATTACKS: dict[str, Attack] = {
    "sign flip": sign_flip, "scale ×1000": scale, "noise": noise, "tiny": tiny, "claim": claim, "collude": collude,
}  # fmt: skip


class Hostile:
    """Runs `inner`, whose clients in `attackers` attack, whether the server trusts them or not."""

    def __init__(
        self, inner: Backend, attackers: Sequence[int], attack: Attack | None, *, trusted: bool = False
    ) -> None:
        self.inner, self.attackers, self.attack, self.trusted = inner, frozenset(attackers), attack, trusted

    def run(
        self, tasks: Sequence[Task], server: ServerState, memories: Mapping[int, Memory], observer: Observer
    ) -> Iterator[Reply]:
        """Everybody trains; then attackers, who have seen all, send what they like."""
        replies = [reply for reply in self.inner.run(tasks, server, memories, observer) if isinstance(reply, Reply)]
        honest = [reply for reply in replies if reply.client not in self.attackers]
        for reply in replies:
            if self.attack is not None and reply.client in self.attackers:
                yield self.attack(reply, server.model, honest, tasks[0].round)
            else:
                yield reply
