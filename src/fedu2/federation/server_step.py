"""The server's step: how far the global model goes along the way that the aggregator found, and with which momentum.

    v ← β v + (θ̄ − θ_g),    θ_g ← θ_g + η v

θ̄ is what the aggregator makes of the clients' models, η = `server.lr` and β = `server.momentum`. η = 1 and β = 0, the
defaults, take θ̄ itself. What clients agree on, round after round, adds up in v; what each does its own way cancels.
Batch-norm buffers are statistics of the clients' images and no parameters: they take no such step.

Hsu, Qi and Brown, Measuring the Effects of Non-Identical Data Distribution for Federated Visual Classification, 2019.
"""

from __future__ import annotations

from torch import Tensor

from fedu2.options import ServerOptions

__all__ = ["step"]


def step(start: Tensor, found: Tensor, velocity: Tensor | None, options: ServerOptions) -> tuple[Tensor, Tensor | None]:
    """From θ_g `start` (P,), θ̄ `found` (P,) and v, None before the first round: the new θ_g and v, None where β = 0."""
    if options.lr == 1 and not options.momentum:
        return found, None  # bit for bit
    move = found - start
    if not options.momentum:
        return start + options.lr * move, None
    velocity = move if velocity is None else options.momentum * velocity + move
    return start + options.lr * velocity, velocity
