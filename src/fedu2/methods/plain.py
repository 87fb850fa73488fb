"""The plain baselines: an objective, trained locally, averaged by data size.

Reference for FedAvg: McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized Data,
AISTATS 2017. FedBYOL keeps each client's target network at the client, as Zhuang et al. (ICLR 2022) do.
"""

from __future__ import annotations

from fedu2.aggregators import aggregators
from fedu2.experiment import Experiment
from fedu2.methods.base import Method
from fedu2.methods.cards import method, stays_for

__all__ = ["fedbyol", "fedsimclr", "fedsimsiam"]


def _plain(experiment: Experiment) -> Method:
    aggregator = aggregators[experiment.aggregator or "fedavg"](experiment)
    return Method(experiment, aggregator, stays=stays_for(experiment))


@method(
    "fedsimclr",
    title="FedSimCLR",
    objectives=("simclr",),
    reference="Chen et al., ICML 2020; McMahan et al., AISTATS 2017",
)
def fedsimclr(experiment: Experiment) -> Method:
    """SimCLR at the clients, FedAvg at the server."""
    return _plain(experiment)


@method(
    "fedsimsiam",
    title="FedSimSiam",
    objectives=("simsiam",),
    reference="Chen and He, CVPR 2021; McMahan et al., AISTATS 2017",
)
def fedsimsiam(experiment: Experiment) -> Method:
    """SimSiam at the clients, FedAvg at the server."""
    return _plain(experiment)


@method(
    "fedbyol",
    title="FedBYOL",
    objectives=("byol",),
    reference="Grill et al., NeurIPS 2020; McMahan et al., AISTATS 2017",
)
def fedbyol(experiment: Experiment) -> Method:
    """BYOL at the clients, each with a target network of its own, FedAvg at the server."""
    return _plain(experiment)
