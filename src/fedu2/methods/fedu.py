"""FedU: Zhuang et al., Collaborative Unsupervised Visual Representation Learning from Decentralized Data, ICCV 2021.

    client:  encoder, projector ← global;  target: its own;  predictor ← global if d_k < μ, else its own
    server:  FedAvg of encoder, projector, predictor

d_k is the divergence of the client's encoder (`fedu2.methods.divergence`), μ is `fedu.threshold`. A predictor belongs
to the encoder that it was trained with: where that has moved far, the client keeps its own.

At its first participation, however late, a client takes everything from the global model, the target network, too.
After an absence of any length it goes on from its last local model, whose d_k decides.
"""

from __future__ import annotations

from dataclasses import dataclass

from fedu2.aggregators import aggregators
from fedu2.experiment import Experiment
from fedu2.methods.base import Learner, Memory, Method, ServerState, Task
from fedu2.methods.cards import method, stays_for
from fedu2.methods.divergence import divergence

__all__ = ["FedU", "fedu"]


@dataclass(frozen=True)
class FedU(Method):
    """A client remembers its predictor, and what d_k needs: its encoder (distance_to_global) or d_k (last_drift)."""

    def receive(self, model: Learner, server: ServerState, memory: Memory | None, task: Task) -> None:
        """The global model; own target, and own predictor where the client has drifted too far."""
        super().receive(model, server, memory, task)
        _, replaced = self._judge(model, server, memory)
        if memory is not None and not replaced:
            predictor = model.section("predictor")
            predictor.params.copy_(memory["predictor.params"])
            predictor.buffers.copy_(memory["predictor.buffers"])

    def remember(self, model: Learner, server: ServerState, memory: Memory | None, task: Task) -> Memory:
        predictor = model.section("predictor")
        kept = dict(super().remember(model, server, memory, task))
        kept["predictor.params"], kept["predictor.buffers"] = predictor.params.clone(), predictor.buffers.clone()
        if self.experiment.fedu.divergence == "last_drift":  # local training began with the global encoder
            kept["divergence"] = divergence(server.model.params, model.params, model.layout)
        else:
            kept["encoder.params"] = model.params[: model.layout.span("encoder").stop].clone()
        return kept

    def notes(self, model: Learner, server: ServerState, memory: Memory | None, task: Task) -> dict[str, float]:
        """d_k, and whether the predictor was replaced, 0 or 1."""
        d, replaced = self._judge(model, server, memory)
        return {"fedu.divergence": d, "fedu.replaced": float(replaced)}

    def _judge(self, model: Learner, server: ServerState, memory: Memory | None) -> tuple[float, bool]:
        """d_k when the client takes part, 0 if it has no past, and whether it takes the global predictor."""
        if memory is None:
            return 0.0, True
        if self.experiment.fedu.divergence == "last_drift":
            d = float(memory["divergence"])
        else:
            d = float(divergence(server.model.params, memory["encoder.params"], model.layout))
        return d, d < self.experiment.fedu.threshold


@method(
    "fedu",
    title="FedU",
    objectives=("byol",),
    remembers="its predictor, its encoder (or how far that moved)",
    reference="Zhuang et al., Collaborative Unsupervised Visual Representation Learning, ICCV 2021",
)
def fedu(experiment: Experiment) -> Method:
    """BYOL whose predictor is replaced by the global one only while a client has not drifted far."""
    aggregator = aggregators[experiment.aggregator or "fedavg"](experiment)
    return FedU(experiment, aggregator, stays=stays_for(experiment))
