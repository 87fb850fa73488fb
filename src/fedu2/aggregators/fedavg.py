"""FedAvg: the mean of the clients' parameters, weighted by their shares of the data.

    θ_g ← Σ_k share_k θ_k

McMahan et al.: Communication-efficient learning of deep networks from decentralized data, AISTATS 2017.
"""

from __future__ import annotations

from fedu2.aggregators.base import Aggregate, Aggregator, Updates, aggregators, require_finite, weighted_sum
from fedu2.experiment import Experiment

__all__ = ["fedavg"]


def fedavg(updates: Updates) -> Aggregate:
    """Σ_k share_k θ_k; clients that agree are returned as they are."""
    require_finite(updates.clients)
    params = weighted_sum(updates.shares, updates.clients)
    return Aggregate(params, updates.shares, updates.shares, {"weights": updates.shares.tolist()})


@aggregators.register("fedavg")
def build(experiment: Experiment) -> Aggregator:
    """FedAvg has no options of its own: shares are n_k/n or 1/K as `client_weights` says."""
    return fedavg
