"""Orchestra at a client: Lubana et al., Unsupervised Federated Learning via Globally Consistent Clustering, ICML 2022.

Its server side, and what happens between rounds, is `fedu2.methods.orchestra`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedu2.experiment import Experiment
from fedu2.models.norm import Chain, Norm
from fedu2.objectives.base import Objective, Outcome, objectives
from fedu2.objectives.heads import projector
from fedu2.objectives.target import Target

__all__ = ["Clusters", "Orchestra", "cluster_loss", "information"]


def cluster_loss(z: Tensor, t: Tensor, centroids: Tensor, temperature: float) -> Tensor:
    """−mean_i Σ_c softmax(T Cᵀ/τ)_ic log softmax(Z Cᵀ/τ)_ic for unit rows Z, T (N, d) and C (G, d); a scalar.

    The clusters that the target network sees in one view are predicted from the other; only Z receives a gradient.
    """
    with torch.autocast(z.device.type, enabled=False):  # τ magnifies what half precision rounds off
        aim = F.softmax(t.detach() @ centroids.T / temperature, dim=1)  # (N, G)
        return F.cross_entropy(z @ centroids.T / temperature, aim)


@torch.no_grad()
def information(t: Tensor, centroids: Tensor, temperature: float) -> Tensor:
    """H(mean_i P_i) − mean_i H(P_i) in nats, P = softmax(T Cᵀ/τ): how much clusters tell of the images of a batch.

    0 where every cluster is alike to all images, and the loss has nothing to say; at most log min(N, G).
    """
    with torch.autocast(t.device.type, enabled=False):  # as in the loss
        log_p = F.log_softmax(t @ centroids.T / temperature, dim=1)  # (N, G)
    mean = log_p.exp().mean(0)
    told: Tensor = (log_p.exp() * log_p).sum(1).mean() - torch.special.xlogy(mean, mean).sum()
    return told


class Clusters(nn.Module):
    """What a client has beside its networks while it trains; made anew in every round.

    memory: (M, d) the latest target projections, the newest last.  filled: how many of its rows, counted from the end,
    are taken.  centroids: (G, d) the global clusters C, which stay as they are during local training.
    """

    memory: Tensor
    filled: Tensor
    centroids: Tensor

    def __init__(self, rows: int, clusters: int, size: int) -> None:
        super().__init__()
        self.register_buffer("memory", torch.zeros(rows, size))
        self.register_buffer("filled", torch.zeros(()))
        self.register_buffer("centroids", torch.zeros(clusters, size))

    def begin(self, centroids: Tensor | None) -> None:
        """Forget all rows, and take the global clusters in; None: there are none yet."""
        self.memory.zero_()
        self.filled.zero_()
        if centroids is None:
            self.centroids.zero_()
        else:
            self.centroids.copy_(centroids)

    @torch.no_grad()
    def push(self, rows: Tensor) -> None:
        """First in, first out: (N, d) new rows push out the oldest; of more than M rows the last M stay."""
        size = len(self.memory)
        self.memory.copy_(torch.cat([self.memory, rows])[-size:])
        self.filled.add_(len(rows)).clamp_(max=size)

    def rows(self) -> Tensor:
        """The rows that are taken, (n, d), the oldest first; waits for the device."""
        return self.memory[len(self.memory) - int(self.filled) :]


@objectives.register("orchestra")
class Orchestra(Objective):
    """ℓ_a = `cluster_loss` of Z², the online projections of view 2, and T¹, the target projections of view 1.

    The projector ends in a batch norm without parameters, which takes off what all projections have in common: without
    it (`orchestra.norm=false`) they come together, and in the end all clusters are alike to them. `information` is
    logged to tell that: the loss does not, for it is about log G as well where clusters differ and views disagree.

    The target θ' follows the online encoder and projector θ after every step, as in BYOL: θ' ← m θ' + (1 − m) θ.
    T¹ goes into the memory. The online network does not see view 1: regularisers find view 2 in both places.
    """

    has_target = True

    def __init__(self, encoder: nn.Module, experiment: Experiment) -> None:
        super().__init__()
        options = experiment.orchestra
        self.encoder = encoder
        size = experiment.heads.out or int(encoder.features)  # type: ignore[arg-type]
        norms = [Norm(size, affine=False)] if options.norm else []
        self.projector = Chain(*projector(encoder, experiment.heads), *norms)
        self.target = Target(self.encoder, self.projector)
        self.clusters = Clusters(options.memory, options.global_clusters, size)
        self.temperature, self.momentum = options.temperature, options.momentum

    def forward(self, view1: Tensor, view2: Tensor) -> Outcome:
        h = self.encoder(view2)  # (N, D)
        z = self.projector(h)  # (N, d)
        with torch.no_grad():
            t = F.normalize(self.target(view1).float(), dim=1)  # (N, d)
        self.clusters.push(t)
        against = self.clusters.centroids, self.temperature
        loss = cluster_loss(F.normalize(z.float(), dim=1), t, *against)
        return Outcome(loss, (h, h), (z, z), terms={"orchestra.information": information(t, *against)})

    def start(self) -> None:
        """Target = online, for a client that has no target of its own yet."""
        self.target.start(self.encoder, self.projector)

    def after_step(self, progress: float) -> None:
        """θ' ← m θ' + (1 − m) θ."""
        self.target.follow(self.encoder, self.projector, self.momentum)
