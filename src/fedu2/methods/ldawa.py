"""L-DAWA: Rehman et al., Layer-wise Divergence Aware Weight Aggregation, ICCV 2023.

Clients train any objective as plain baselines do; only the server differs, see `fedu2.aggregators.ldawa`.
"""

from __future__ import annotations

from fedu2.aggregators import aggregators
from fedu2.experiment import Experiment
from fedu2.methods.base import Method
from fedu2.methods.cards import method, stays_for

__all__ = ["ldawa"]


@method(
    "ldawa",
    title="L-DAWA",
    objectives=("simclr", "byol", "simsiam"),
    aggregator="ldawa",
    reference="Rehman et al., L-DAWA: Layer-wise Divergence Aware Weight Aggregation, ICCV 2023",
)
def ldawa(experiment: Experiment) -> Method:
    """Clients count by the angle between their weights and the global ones, tensor by tensor."""
    return Method(experiment, aggregators[experiment.aggregator or "ldawa"](experiment), stays=stays_for(experiment))
