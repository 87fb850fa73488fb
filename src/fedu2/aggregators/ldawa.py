"""L-DAWA: clients count by the angle between their weights and the global ones, tensor by tensor.

    δ_k^l = cos(θ_k^l, θ_g^l),        θ_g^l ← (1/K) Σ_k δ_k^l θ_k^l

θ^l is the l-th parameter tensor or batch-norm buffer, θ_g what was sent out, K the number of the round's clients, which
all count alike. The δ are not divided by their sum: weights shrink as the angles grow (`ldawa.renormalize` divides). A
tensor that is zero at the client or at the server has no angle and counts with δ = 1; rounding cannot raise δ above 1.

`ldawa.level=model` takes one cosine of all weights and buffers, as the FedU² authors' port does; `ldawa.warm_up` begins
with rounds of FedAvg, as L-DAWA's own code does.

Rehman et al.: L-DAWA, Layer-wise Divergence Aware Weight Aggregation in Federated Self-Supervised Visual Representation
Learning, ICCV 2023.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fedu2.aggregators.base import (
    Aggregate,
    Aggregator,
    Updates,
    aggregators,
    inner_products,
    require_finite,
    weighted_sum,
)
from fedu2.aggregators.fedavg import fedavg
from fedu2.experiment import Experiment
from fedu2.models.flat import Layout
from fedu2.options import LDAWAOptions

__all__ = ["cosines", "ldawa"]


def ldawa(options: LDAWAOptions) -> Aggregator:
    """L-DAWA with these options."""

    def aggregate(updates: Updates) -> Aggregate:
        if updates.round <= options.warm_up:
            return fedavg(updates)
        require_finite(updates.clients)
        parts = [(updates.start, updates.clients, _spans(updates.layout, len(updates.start)))]
        if updates.buffers is not None:
            buffers = updates.buffers
            parts.append((buffers.start, buffers.clients, _spans(buffers.layout, len(buffers.start))))
        factors = [cosines(*part) for part in parts]  # (K, tensors) each
        if options.level == "model":
            overall = _overall(parts)
            factors = [overall[:, None].expand_as(factor) for factor in factors]
        new = [_combined(factor, *part[1:], options) for factor, part in zip(factors, parts, strict=True)]
        sizes = torch.tensor([span.stop - span.start for span in parts[0][2]], dtype=torch.float64)
        mean = factors[0] @ sizes / sizes.sum()  # (K,) of all weights
        equal = torch.full_like(updates.shares, 1 / len(updates.shares))
        metrics = {"cosines": mean.tolist(), "smallest": float(factors[0].min())}
        return Aggregate(new[0], mean * equal, equal, metrics, new[1] if len(new) > 1 else None)

    return aggregate


@aggregators.register("ldawa")
def build(experiment: Experiment) -> Aggregator:
    """L-DAWA with the options of the experiment's `ldawa` group."""
    return ldawa(experiment.ldawa)


def cosines(start: Tensor, clients: Tensor, spans: list[slice]) -> Tensor:
    """δ of every client (rows of (K, P)) and tensor (`spans` of the columns): (K, tensors) float64 on the CPU, ≤ 1."""
    found = [_cosine(*inner_products(clients[:, span], start[span])) for span in spans]
    return torch.stack(found, dim=1) if found else torch.ones(len(clients), 0, dtype=torch.float64)


def _overall(parts: list[tuple[Tensor, Tensor, list[slice]]]) -> Tensor:
    """One cosine a client over all parts, (K,)."""
    found = [inner_products(clients, start) for start, clients, _ in parts]
    return _cosine(*(sum(terms[1:], terms[0]) for terms in zip(*found, strict=True)))


def _cosine(products: Tensor, squares: Tensor, square: Tensor) -> Tensor:
    """⟨θ_k, θ_g⟩ / (‖θ_k‖ ‖θ_g‖), at most 1; 1 where there is no angle."""
    lengths = (squares * square).sqrt()
    return torch.where(lengths > 0, products / lengths.clamp_min(torch.finfo(lengths.dtype).tiny), 1.0).clamp_max(1.0)


def _combined(factors: Tensor, clients: Tensor, spans: list[slice], options: LDAWAOptions) -> Tensor:
    """(1/K) Σ_k δ_k^l θ_k^l for each tensor, or Σ_k δ_k^l θ_k^l / Σ_k δ_k^l."""
    weights = factors / len(factors)
    if options.renormalize:
        total = factors.sum(0)
        weights = torch.where(total > 0, factors / total, weights)  # opposed clients: there is nothing to divide by
    result = clients.new_empty(clients.shape[1])
    for weight, span in zip(weights.T, spans, strict=True):
        result[span] = weighted_sum(weight, clients[:, span])
    return result


def _spans(layout: Layout, size: int) -> list[slice]:
    """Where each tensor lies; a vector without a layout counts as one tensor."""
    spans = [slice(entry.start, entry.stop) for entry in layout.entries]
    return spans or ([slice(0, size)] if size else [])
