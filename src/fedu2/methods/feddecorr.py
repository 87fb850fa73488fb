"""FedDecorr: Shi et al., Towards Understanding and Mitigating Dimensional Collapse in Heterogeneous Federated Learning,
ICLR 2023.

    client:  L = ℓ_a(Z¹, Z²) + β (L_decorr(Z¹) + L_decorr(Z²))     L_decorr: `fedu2.regularizers.decorrelation`
    server:  θ_g ← Σ_k n_k/n θ_k

The paper penalises the features under a supervised classifier. Here a self-supervised objective stands in its place,
and the projections are penalised, as the FedU² authors did for their comparison.
"""

from __future__ import annotations

from fedu2.aggregators import aggregators
from fedu2.experiment import Experiment
from fedu2.methods.base import Method, Regularizer
from fedu2.methods.cards import method, stays_for
from fedu2.regularizers.decorrelation import Decorrelation

__all__ = ["feddecorr"]


@method(
    "feddecorr",
    title="FedDecorr",
    objectives=("byol", "simclr", "simsiam"),
    reference="Shi et al., Towards Understanding and Mitigating Dimensional Collapse in Heterogeneous Federated "
    "Learning, ICLR 2023",
)
def feddecorr(experiment: Experiment) -> Method:
    """A penalty on correlated dimensions at the clients, FedAvg at the server."""
    options = experiment.feddecorr
    regularizers: tuple[Regularizer, ...] = (Decorrelation(options),) if options.weight > 0 else ()
    aggregator = aggregators[experiment.aggregator or "fedavg"](experiment)
    return Method(experiment, aggregator, regularizers, stays_for(experiment))
