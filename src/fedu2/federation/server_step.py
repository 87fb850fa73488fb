"""The server's step: how far the global model goes along the way that the aggregator found, and with which momentum.

    v ← β v + (θ̄ − θ_s),    θ_g ← θ_s + min(η, 1) v,    θ_s ← θ_s + η v

θ̄ is what the aggregator makes of the clients' models, η = `server.lr` and β = `server.momentum`. η = 1 and β = 0, the
defaults, take θ̄ itself. What clients agree on, round after round, adds up in v; what each does its own way cancels.

θ_g is the global model, which is judged, saved and exported; θ_s is what is sent to the clients. They differ where
η > 1: a longer step overshoots in what settles within a round (heads, an encoder's first layers), and clients mend it
in the next. From η = 2 on θ_s is a worse model than the mean that it came from, and worse the longer the step
(docs/research/12-step-not-for-targets.md). FedExP judges means of its iterates, too, and not the last (ICLR 2023).
When the clients' rate has fallen to almost nothing they mend nothing any more, and a run would end with what overshot:
`server.until` ends longer steps before. With `server.parts=encoder` heads, which settle first, are sent as the
aggregator found them, and the encoder alone lies ahead
(docs/research/14-step-by-row.md).

Batch-norm buffers are statistics of the clients' images and no parameters: they take no such step. Nor does a target
network θ' that travels. It is trained by nobody: at the end of a round each client's has caught up with the client's
own θ, wherever it was sent from. So θ' ← θ' + η (θ̄' − θ') with η = 2 mirrors θ' at θ̄', round after round, however
little is learned, and with η > 2 it runs away. It goes as far as the clients' targets, and no farther: η is at most 1
for it, and β is 0.

Hsu, Qi and Brown, Measuring the Effects of Non-Identical Data Distribution for Federated Visual Classification, 2019.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fedu2.options import ServerOptions

__all__ = ["ahead", "options_at", "step"]

WHOLE = slice(None)


def options_at(options: ServerOptions, round_: int, rounds: int) -> ServerOptions:
    """Those of the step that ends a round: η > 1 holds until the share `until` of all rounds is over, and is 1 then."""
    if options.lr <= 1 or round_ / rounds <= options.until:
        return options
    return options.model_copy(update={"lr": 1.0})


def step(
    sent: Tensor, found: Tensor, velocity: Tensor | None, options: ServerOptions, trained: int | None = None
) -> tuple[Tensor, Tensor | None]:
    """From θ_s `sent` (P,), θ̄ `found` (P,) and v, None before the first round: the new θ_g and v.

    v is None where it is not needed: β = 0 and η at most 1. trained: how many leading parameters are trained; the
    others are a target network's. None: all.
    """
    if options.lr >= 1 and not options.momentum:
        return found, found - sent if options.lr > 1 else None  # θ̄ bit for bit
    move = found - sent
    carried = move if velocity is None else options.momentum * velocity + move
    params = sent + min(options.lr, 1.0) * carried
    if trained is not None:
        params[trained:] = torch.lerp(sent[trained:], found[trained:], min(options.lr, 1.0))
    return params, carried if options.momentum else None


def ahead(params: Tensor, velocity: Tensor | None, options: ServerOptions, part: slice = WHOLE) -> Tensor:
    """θ_s = θ_g + (η − 1) v in `part` of it, and θ_g elsewhere, or where η is at most 1; all (P,)."""
    if velocity is None or options.lr <= 1:
        return params
    sent = params.clone()
    sent[part] += (options.lr - 1) * velocity[part]
    return sent
