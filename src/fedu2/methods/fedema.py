"""FedEMA: Zhuang et al., Divergence-Aware Federated Self-Supervised Learning, ICLR 2022.

    client:  W_k ← μ_k W_k + (1 − μ_k) W_g    for encoder, projector and predictor; target: its own
             μ_k = min(λ_k d_k, cap),  λ_k = τ/d_k of the first time
    server:  FedAvg of encoder, projector, predictor

W_k is the client's last local model, W_g the new global one, d_k the divergence of the client's encoder
(`fedu2.methods.divergence`). The more a client has diverged, the more of its own model it keeps.

λ_k is set once: from the first local training (`last_drift`), or from the distance at the first merge
(`distance_to_global`). So a client that takes part twice in a row has μ_k = τ at the second time, or the cap if that is
smaller. While d_k = 0 there is nothing to scale by: μ_k = 0, and λ_k waits.

At its first participation, however late, a client takes everything from the global model, the target network, too. So
does a client that did not train in the round before (`fedema.after_absence=overwrite`); its λ_k is kept.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fedu2.aggregators import aggregators
from fedu2.experiment import Experiment
from fedu2.methods.base import Learner, Memory, Method, ServerState, Task
from fedu2.methods.cards import method, stays_for
from fedu2.methods.divergence import divergence
from fedu2.models.flat import ModelState

__all__ = ["FedEMA", "fedema"]


@dataclass(frozen=True)
class FedEMA(Method):
    """A client remembers its last local model, when that was, λ_k once it is set, and d_k if that is `last_drift`."""

    def receive(self, model: Learner, server: ServerState, memory: Memory | None, task: Task) -> None:
        """The global model merged with the client's own; without one to merge, the global model for everything."""
        own = self._to_merge(memory, task)
        super().receive(model, server, own, task)
        if own is not None:
            online, mu = _online(model), self._mu(model, server, own)
            online.params.lerp_(own["online.params"], mu)
            online.buffers.lerp_(own["online.buffers"], mu)

    def remember(self, model: Learner, server: ServerState, memory: Memory | None, task: Task) -> Memory:
        online, own = _online(model), self._to_merge(memory, task)
        kept = dict(super().remember(model, server, memory, task))
        kept["online.params"], kept["online.buffers"] = online.params.clone(), online.buffers.clone()
        kept["round"] = torch.tensor(task.round, device=model.params.device)
        d = 0.0
        if self.experiment.fedema.divergence == "last_drift":
            kept["divergence"] = self._drift(model, server, own)
            d = float(kept["divergence"])
        elif own is not None:
            d = self._divergence(model, server, own)
        scale = self._autoscale(memory, d)
        if scale > 0 and self.experiment.fedema.scale is None:
            kept["scale"] = torch.tensor(scale, dtype=torch.float64, device=model.params.device)
        return kept

    def notes(self, model: Learner, server: ServerState, memory: Memory | None, task: Task) -> dict[str, float]:
        """μ_k, the share of its own model with which the client began; 0 where it took the global one."""
        own = self._to_merge(memory, task)
        return {"fedema.mu": 0.0 if own is None else self._mu(model, server, own)}

    def _to_merge(self, memory: Memory | None, task: Task) -> Memory | None:
        """The client's memory, if its model is to be merged."""
        if memory is None or self.experiment.fedema.after_absence == "merge":
            return memory
        return memory if int(memory["round"]) == task.round - 1 else None

    def _mu(self, model: Learner, server: ServerState, own: Memory) -> float:
        """μ_k = min(λ_k d_k, cap)."""
        options, d = self.experiment.fedema, self._divergence(model, server, own)
        scale = self._autoscale(own, d) if options.scale is None else options.scale
        return min(scale * d, options.cap)

    def _autoscale(self, memory: Memory | None, d: float) -> float:
        """λ_k: the one that was set, or else τ/d; 0 while it cannot be set."""
        if memory is not None and "scale" in memory:
            return float(memory["scale"])
        return self.experiment.fedema.tau / d if d > 0 else 0.0

    def _divergence(self, model: Learner, server: ServerState, own: Memory) -> float:
        """d_k when the client takes part again."""
        if self.experiment.fedema.divergence == "last_drift":
            return float(own["divergence"])
        return float(divergence(server.model.params, own["online.params"], model.layout))

    def _drift(self, model: Learner, server: ServerState, own: Memory | None) -> torch.Tensor:
        """How far the encoder moved in the training that has just ended: it began with the merged model."""
        end = model.layout.span("encoder").stop
        start = server.model.params[:end]
        if own is not None:
            start = start.lerp(own["online.params"][:end], self._mu(model, server, own))
        return divergence(start, model.params, model.layout)


def _online(model: Learner) -> ModelState:
    """Views of all that is merged: everything but the target network."""
    layout, buffers = model.layout.prefix(("target",)), model.buffer_layout.prefix(("target",))
    return ModelState(model.params[: layout.size], model.buffers[: buffers.size])


@method(
    "fedema",
    title="FedEMA",
    objectives=("byol",),
    remembers="its last model, a scale",
    reference="Zhuang et al., Divergence-Aware Federated Self-Supervised Learning, ICLR 2022",
)
def fedema(experiment: Experiment) -> Method:
    """BYOL whose clients merge the global model with their own: the further they diverged, the more they keep."""
    aggregator = aggregators[experiment.aggregator or "fedavg"](experiment)
    return FedEMA(experiment, aggregator, stays=stays_for(experiment))
