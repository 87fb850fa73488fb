"""Orchestra: Lubana et al., Unsupervised Federated Learning via Globally Consistent Clustering, ICML 2022.

    client:  L = ℓ_cluster(Z², T¹; C) + L_rotation      `fedu2.objectives.orchestra`, `fedu2.regularizers.rotation`
             L centroids of the last M target projections, in clusters of equal size
    server:  θ_g ← Σ_k share_k θ_k, target network included
             C ← 500 steps of SGD toward clusters of equal size of all centroids that arrived

Both clusterings are in `fedu2.methods.clustering`. Before the first round there is a prelude without training, in which
clients send centroids of the untrained target's projections, and the server makes the first C of them.

The target moves after each step, where the authors' code moves it before each use. While it travels that is the same
sequence: the server's mean of the clients' moved targets is the moved mean. A target that stays at its client
(`byol.target=local`) also moves when the global model arrives, as it does there; the move after the last step is then
one more.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, cast

import torch
from torch import Tensor

from fedu2.aggregators import Updates, aggregators
from fedu2.experiment import Experiment
from fedu2.methods.base import Learner, Memory, Method, ServerState, Task
from fedu2.methods.cards import method, stays_for
from fedu2.methods.clustering import clustering_loss, global_clusters, initial_clusters, local_clusters
from fedu2.objectives.orchestra import Orchestra
from fedu2.seeds import generator

__all__ = ["OrchestraMethod", "orchestra"]


@dataclass(frozen=True)
class OrchestraMethod(Method):
    """Global clusters C, in `ServerState.extra`, that all clients train toward and contribute to."""

    def receive(self, model: Learner, server: ServerState, memory: Memory | None, task: Task) -> None:
        """Client: the global model and clusters, and an empty memory."""
        super().receive(model, server, memory, task)
        learner = cast(Orchestra, model.module)
        learner.clusters.begin(server.extra.get("centroids"))
        if "target" in self.stays:
            learner.after_step(task.progress)

    def payload(self, model: Learner, task: Task) -> Memory:
        """Client: centroids (L, d) of the target projections in its memory."""
        random = generator("cpu", self.experiment.seed, "local clusters", task.round, task.client)
        rows = cast(Orchestra, model.module).clusters.rows()
        return {"centroids": local_clusters(rows, self.experiment.orchestra.local_clusters, random)}

    def doubts(self, payload: Memory) -> str | None:
        """Server: L centroids of unit length, in the space of the projections."""
        centroids = payload.get("centroids")
        if len(payload) != 1 or centroids is None or centroids.dtype != torch.float32:
            return "its payload is not centroids"
        if centroids.shape != (self.experiment.orchestra.local_clusters, self._projections):
            return f"its centroids are {tuple(centroids.shape)}"
        return None if bool((centroids.norm(dim=1) < 1.01).all()) else "its centroids are longer than 1"

    @cached_property
    def _projections(self) -> int:
        """d, the dimension of the projections."""
        return cast(Orchestra, self.learner()).clusters.centroids.shape[1]

    def prepare(self, server: ServerState, payloads: Sequence[Memory]) -> ServerState:
        """Server: the first global clusters."""
        points = _arrived(payloads)
        random = generator("cpu", self.experiment.seed, "global clusters")
        start = initial_clusters(points, self.experiment.orchestra.global_clusters, random)
        return replace(server, extra={"centroids": self._moved(start, points)})

    def aggregate(
        self, server: ServerState, updates: Updates, payloads: Sequence[Memory]
    ) -> tuple[ServerState, dict[str, Any]]:
        """Server: the next global model, and clusters that go on from the present ones."""
        server, logged = super().aggregate(server, updates, payloads)
        points = _arrived(payloads)
        centroids = self._moved(server.extra["centroids"], points)
        loss = float(clustering_loss(centroids, points, self.experiment.orchestra.temperature))
        return replace(server, extra={"centroids": centroids}), {**logged, "orchestra.clustering": loss}

    def _moved(self, centroids: Tensor, points: Tensor) -> Tensor:
        options = self.experiment.orchestra
        return global_clusters(centroids, points, steps=options.server_steps, temperature=options.temperature)


def _arrived(payloads: Sequence[Memory]) -> Tensor:
    """The centroids of all clients, client after client."""
    return torch.cat([payload["centroids"] for payload in payloads])


@method(
    "orchestra",
    title="Orchestra",
    objectives=("orchestra",),
    target="shared",
    rotation=1.0,
    sends="cluster centroids",
    reference="Lubana et al., Unsupervised Federated Learning via Globally Consistent Clustering, ICML 2022",
)
def orchestra(experiment: Experiment) -> Method:
    """Clients cluster locally, the server globally, and all train toward the same clusters."""
    return OrchestraMethod(
        experiment,
        aggregators[experiment.aggregator or "fedavg"](experiment),
        stays=stays_for(experiment),
        scratch=("clusters",),
        prelude=math.ceil(experiment.orchestra.memory / experiment.batch_size),
        least_spread=0.002,  # 0.003 after a first round, when the mean of models has statistics that are not its own
    )
