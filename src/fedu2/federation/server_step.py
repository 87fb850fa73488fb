"""The server's step: how far the global model goes along the way that the aggregator found, and with which momentum.

    v ← β v + (θ̄ − θ_g),    θ_g ← θ_g + η v

θ̄ is what the aggregator makes of the clients' models, η = `server.lr` and β = `server.momentum`. η = 1 and β = 0, the
defaults, take θ̄ itself. What clients agree on, round after round, adds up in v; what each does its own way cancels.
Batch-norm buffers are statistics of the clients' images and no parameters: they take no such step.

Nor does a target network θ' that travels. It is trained by nobody: at the end of a round each client's has caught up
with the client's own θ, wherever it was sent from. So θ' ← θ' + η (θ̄' − θ') with η = 2 mirrors θ' at θ̄', round after
round, however little is learned, and with η > 2 it runs away. It goes as far as the clients' targets, and no farther:
η is at most 1 for it, and β is 0.

Hsu, Qi and Brown, Measuring the Effects of Non-Identical Data Distribution for Federated Visual Classification, 2019.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fedu2.options import ServerOptions

__all__ = ["step"]


def step(
    start: Tensor, found: Tensor, velocity: Tensor | None, options: ServerOptions, trained: int | None = None
) -> tuple[Tensor, Tensor | None]:
    """From θ_g `start` (P,), θ̄ `found` (P,) and v, None before the first round: the new θ_g and v, None where β = 0.

    trained: how many leading parameters are trained; the others are a target network's. None: all.
    """
    if options.lr == 1 and not options.momentum:
        return found, None  # bit for bit
    move = found - start
    carried = move if velocity is None else options.momentum * velocity + move
    params = start + options.lr * carried
    if trained is not None:
        params[trained:] = torch.lerp(start[trained:], found[trained:], min(options.lr, 1.0))
    return params, carried if options.momentum else None
