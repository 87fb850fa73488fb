"""SSD: Fang et al., Soft Separation and Distillation: Toward Global Uniformity in Federated Unsupervised Learning, ICCV
2025.

    client:  L = L_align + β L_uniform + γ L_DSR + δ L_distill     the first two: `fedu2.objectives.alignuniform`
    server:  θ_g ← Σ_k n_k/n θ_k

Dimension-scaled regularisation (DSR) has every client stretch its representations along dimensions of its own, so that
clients do not crowd the same part of the sphere. All of that acts on the projector's output z; distillation hands it on
to the encoder, whose output h is what is used in the end. With u = z/‖z‖, σ = softmax, sg = stop-gradient, and d_k (d,)
= α on the client's own dimensions, 1 elsewhere:

                 ssd.form=paper                      ssd.form=code
    L_DSR        mean_i ‖u_i − sg(u_i ⊙ d_k)‖²       ‖U − sg(V)‖_F / N,  v_i = u_i ⊙ d_k at length 1
    L_distill    mean_i KL(σ(h_i) ‖ σ(sg z_i))       mean_i KL(σ(z_i/T) ‖ σ(h_i/T)), z with its gradient

Both are expectations over a client's embeddings, so the two views are averaged. docs/methods/ssd.md tells where the
authors' code differs beyond that.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedu2.aggregators import aggregators
from fedu2.errors import UsageError
from fedu2.experiment import Experiment
from fedu2.methods.base import Batch, Learner, Memory, Method, ServerState, Task
from fedu2.methods.cards import method
from fedu2.models import build_encoder
from fedu2.objectives import Objective, Outcome
from fedu2.objectives.alignuniform import on_sphere
from fedu2.options import SSDOptions

__all__ = ["SSD", "distillation", "scale_vector", "separation", "ssd"]


def scale_vector(d: int, clients: int, client: int, alpha: float) -> Tensor:
    """d_k (d,): α on the ⌊d/K⌋ dimensions that belong to client k alone, 1 elsewhere.

    With more clients than dimensions each has one, and client k shares it with k ± d, k ± 2d, ...
    """
    own = max(1, d // clients)
    start = client * own % d
    scale = torch.ones(d)
    scale[start : start + own] = alpha
    return scale


def separation(u: Tensor, scale: Tensor, options: SSDOptions) -> Tensor:
    """L_DSR of unit vectors u (V, N, d) toward their versions stretched by d_k (d,); the mean over V views."""
    target = (u * scale).detach()
    if options.form == "paper":
        return (u - target).square().sum(-1).mean()
    squared = (u - on_sphere(target)).square().sum((-2, -1))  # (V,)
    distance: Tensor = (squared + 1e-8).sqrt()  # at distance 0 (K = 1, α = 1) rounding must have no gradient
    return distance.mean() / u.shape[-2]


def distillation(h: Tensor, z: Tensor, options: SSDOptions) -> Tensor:
    """L_distill from projections z to features h, both (V, N, d); the mean over views and images."""
    if options.form == "paper":
        student, teacher = F.log_softmax(h, -1), F.log_softmax(z.detach(), -1)
        return _divergence(student, teacher)
    student, teacher = F.log_softmax(h / options.temperature, -1), F.log_softmax(z / options.temperature, -1)
    return _divergence(teacher, student)


def _divergence(log_p: Tensor, log_q: Tensor) -> Tensor:
    """mean KL(p ‖ q) over all but the last axis."""
    return (log_p.exp() * (log_p - log_q)).sum(-1).mean()


class Separation(nn.Module):
    """Where a client's d_k (d,) lies while it trains."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(d))


@dataclass(frozen=True)
class SSD(Method):
    """Alignment and uniformity, with a term that separates clients and one that teaches the encoder."""

    scratch: tuple[str, ...] = ("separation",)

    def learner(self) -> Objective:
        """With a last section `separation`, which holds d_k."""
        learner, experiment = super().learner(), self.experiment
        d = experiment.heads.out or int(learner.encoder.features)  # type: ignore[arg-type]
        learner.separation = Separation(d)
        return learner

    def receive(self, model: Learner, server: ServerState, memory: Memory | None, task: Task) -> None:
        """The global model, and the client's own d_k."""
        super().receive(model, server, memory, task)
        scale = model.section("separation").buffers
        scale.copy_(scale_vector(len(scale), self.experiment.clients, task.client, self.experiment.ssd.scale))

    def outcome(self, learner: Objective, batch: Batch, generator: torch.Generator) -> Outcome:
        """ℓ_a + γ L_DSR + δ L_distill; a term of weight 0 is not computed."""
        outcome, options = super().outcome(learner, batch, generator), self.experiment.ssd
        loss, terms = outcome.loss, {"align": outcome.loss.detach(), **outcome.terms}
        z = torch.stack(outcome.projections).float()  # (2, N, d)
        if options.separation:
            term = separation(on_sphere(z), learner.get_buffer("separation.scale"), options)
            loss = loss + options.separation * term
            terms["ssd.separation"] = term.detach()
        if options.distillation:
            term = distillation(torch.stack(outcome.features).float(), z, options)
            loss = loss + options.distillation * term
            terms["ssd.distillation"] = term.detach()
        return replace(outcome, loss=loss, terms=terms)


@method(
    "ssd",
    title="SSD",
    objectives=("alignuniform",),
    reference="Fang et al., Soft Separation and Distillation: Toward Global Uniformity in Federated Unsupervised "
    "Learning, ICCV 2025",
)
def ssd(experiment: Experiment) -> Method:
    """Alignment and uniformity, with dimensions of its own for every client, distilled into the encoder."""
    _check_sizes(experiment)
    return SSD(experiment, aggregators[experiment.aggregator or "fedavg"](experiment))


def _check_sizes(experiment: Experiment) -> None:
    """Distillation compares projections with features, coordinate by coordinate."""
    d = experiment.heads.out
    if d is None or not experiment.ssd.distillation:
        return
    features = int(build_encoder(experiment.encoder, experiment.width).features)  # type: ignore[arg-type]
    if d != features:
        raise UsageError(
            f"ssd.distillation compares projections with the encoder's {features} features: "
            f"heads.out={d} must be {features}, or null"
        )
