"""FedAlignUniform: alignment and uniformity at the clients, averaged by data size.

    client:  L = L_align(z1, z2) + β ½ [L_uniform(z1) + L_uniform(z2)]     `fedu2.objectives.alignuniform`
    server:  θ_g ← Σ_k n_k/n θ_k

The loss is Wang and Isola's (ICML 2020). Under this name it is the baseline that SSD (Fang et al., ICCV 2025) stands
on. Clients remember nothing.
"""

from __future__ import annotations

from fedu2.aggregators import aggregators
from fedu2.experiment import Experiment
from fedu2.methods.base import Method
from fedu2.methods.cards import method

__all__ = ["fedalignuniform"]


@method(
    "fedalignuniform",
    title="FedAlignUniform",
    objectives=("alignuniform",),
    reference="Wang and Isola, ICML 2020; McMahan et al., AISTATS 2017",
)
def fedalignuniform(experiment: Experiment) -> Method:
    """Alignment and uniformity on the sphere at the clients, FedAvg at the server."""
    return Method(experiment, aggregators[experiment.aggregator or "fedavg"](experiment))
