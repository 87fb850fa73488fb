"""FedU²: Liao et al., Rethinking the Representation in Federated Unsupervised Learning with Non-IID Data, CVPR 2024.

    client:  L = ℓ_a(Z¹, Z²) + λ_U (ℓ_u(Z¹) + ℓ_u(Z²))     ℓ_u: FUR, `fedu2.regularizers.fur`
    server:  θ_g ← θ_g + η Σ_k w_k (θ_k − θ_g)              w: EUA, `fedu2.aggregators.eua`

Its ablations are settings: `fur.weight=0` is FedU² without FUR, `aggregator=fedavg` FedU² without EUA. With BYOL each
client keeps its target network, as in FedBYOL, so that the two differ by FUR and EUA alone. In the authors' code the
target travels: `byol.target=shared` aggregates it with the same w, by which only what is trained decides, and with η at
most 1.
"""

from __future__ import annotations

from fedu2.aggregators import aggregators
from fedu2.experiment import Experiment
from fedu2.methods.base import Method, Regularizer
from fedu2.methods.cards import method, stays_for
from fedu2.regularizers.term import FUR

__all__ = ["fedu2"]


@method(
    "fedu2",
    title="FedU²",
    objectives=("byol", "simclr", "simsiam"),
    aggregator="eua",
    fur=True,
    plain={"aggregator": "fedavg", "fur.weight": 0.0},
    parts={"fur.weight": "FUR", "aggregator": "EUA"},
    reference="Liao et al., Rethinking the Representation in Federated Unsupervised Learning, CVPR 2024",
)
def fedu2(experiment: Experiment) -> Method:
    """Uniform representations at the clients (FUR), unified models at the server (EUA)."""
    regularizers: tuple[Regularizer, ...] = (FUR(experiment.fur),) if experiment.fur.weight > 0 else ()
    aggregator = aggregators[experiment.aggregator or "eua"](experiment)
    return Method(experiment, aggregator, regularizers, stays_for(experiment))
