"""FedX: Han et al., FedX: Unsupervised Federated Learning with Cross Knowledge Distillation, ECCV 2022.

A client learns from its own views and from the global model of the round, and from each of them twice: by contrast
between images, and by relations to other images x_r of its own. With z = G(F(x)), p = q(z), and zᵍ the projection of
the teacher, a frozen copy of encoder and projector as they came from the server:

    L = ℓ_a(x1, x2) + NTXent(p1, zᵍ2; τ) + R(z1, z2 | z_r) + R(p1, p2 | zᵍ_r)

ℓ_a is NTXent(z1, z2; τ), or BYOL's loss where that is the objective. R compares how the two views of an image are
related to the others, r(a | B) = softmax_j(cos(a, b_j)/τ): see `relational`. The server averages everything.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from fedu2.aggregators import aggregators
from fedu2.experiment import Experiment
from fedu2.methods.base import Batch, Learner, Memory, Method, ServerState, Task
from fedu2.methods.cards import method, stays_for
from fedu2.objectives import BYOL, Objective, Outcome
from fedu2.objectives.byol import byol_loss
from fedu2.objectives.heads import predictor
from fedu2.objectives.simclr import contrast
from fedu2.objectives.target import Target
from fedu2.options import FedXOptions
from fedu2.seeds import derive

__all__ = ["FedX", "fedx", "relational"]


def relational(a1: Tensor, a2: Tensor, others: Tensor, options: FedXOptions) -> Tensor:
    """R(a1, a2 | B), the mean of `divergences` over images: (...) for a1, a2 (..., N, d) and B (..., M, d)."""
    views = F.normalize(torch.stack([a1, a2]).float(), dim=-1)
    return divergences(views @ F.normalize(others.float(), dim=-1).mT, options).mean(-1)


def divergences(cosines: Tensor, options: FedXOptions) -> Tensor:
    """How differently the two views of each image are related to the others: (..., N) of cosines (2, ..., N, M).

    With r_v = softmax_j(cos(a_v, b_j)/τ) and t = ½ Σ_v softmax_j(cos(a_v, b_j)/τ₂), through which gradients flow, too:

        toward_mean:  ½ [KL(t‖r_1) + KL(t‖r_2)]
        js:           ½ [KL(r_1‖t) + KL(r_2‖t)], the Jensen-Shannon divergence of r_1 and r_2 if τ₂ = τ
    """
    log_r = F.log_softmax(cosines / options.temperature, dim=-1)
    alike = options.target_temperature == options.temperature
    log_s = log_r if alike else F.log_softmax(cosines / options.target_temperature, dim=-1)
    log_t = torch.logaddexp(log_s[0], log_s[1]) - math.log(2)  # in logarithms, because t itself may round to 0
    found = _kl(log_r, log_t) if options.divergence == "js" else _kl(log_t, log_r)  # (2, ..., N)
    return found.mean(0)


def _units(*rows: Tensor) -> Tensor:
    """Batches (N, d), stacked, with every row brought to length 1, in float32."""
    return F.normalize(torch.stack(rows).float(), dim=-1)


def _kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """KL(p‖q) over the last axis."""
    return (log_p.exp() * (log_p - log_q)).sum(-1)


@dataclass(frozen=True)
class FedX(Method):
    """The learner has a predictor, and a section `teacher` that every client makes anew from what it receives."""

    def learner(self) -> Objective:
        """The objective's networks, a predictor if it has none, and the teacher."""
        learner = super().learner()
        if not hasattr(learner, "predictor"):
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(derive(self.experiment.seed, "predictor"))
                learner.predictor = predictor(learner.encoder, self.experiment.heads)
        learner.teacher = Target(learner.encoder, learner.projector)
        return learner

    def receive(self, model: Learner, server: ServerState, memory: Memory | None, task: Task) -> None:
        """Client: as ever, and the teacher is the encoder and projector that have just arrived."""
        super().receive(model, server, memory, task)
        learner = model.module
        cast(Target, learner.teacher).start(learner.encoder, learner.projector)

    def outcome(self, learner: Objective, batch: Batch, generator: torch.Generator) -> Outcome:
        """Client: the four terms, each logged."""
        x1, x2, x_r = batch.view1, batch.view2, batch.other
        assert x_r is not None, "`wants_others` asks for them"
        h1, h2, h_r = learner.together(learner.encoder, x1, x2, x_r)  # (N, D)
        z1, z2, z_r = learner.together(learner.projector, h1, h2, h_r)  # (N, d)
        p1, p2 = learner.both(learner.get_submodule("predictor"), z1, z2)  # (N, d)
        with torch.no_grad():
            taught2, taught_r = _units(*learner.both(learner.get_submodule("teacher"), x2, x_r))  # (N, d)
            targets = learner.both(learner.target, x1, x2) if isinstance(learner, BYOL) else None  # (N, d)

        options = self.experiment.fedx
        with torch.autocast(z1.device.type, enabled=False):  # cosines over τ = 0.1 need more than 8 bits
            own = _units(z1, z2, z_r, p1, p2)  # of length 1, once for all terms
            views, others, predictions = own[:2], own[2], own[3:]
            contrasted = torch.cat([predictions[0], taught2])
            related = torch.stack([views @ others.mT, predictions @ taught_r.mT], dim=1)  # (2, 2, N, N)
            local = byol_loss((p1, p2), targets) if targets else contrast(views.flatten(0, 1), options.temperature)
            taught = contrast(contrasted, options.temperature)
            own_relation, taught_relation = divergences(related, options).mean(-1).unbind()
        terms = {
            "fedx.local": local,
            "fedx.global": taught,
            "fedx.local_relation": own_relation,
            "fedx.global_relation": taught_relation,
        }
        logged = {name: term.detach() for name, term in terms.items()}
        return Outcome(local + taught + own_relation + taught_relation, (h1, h2), (z1, z2), (p1, p2), logged)


@method(
    "fedx",
    title="FedX",
    objectives=("simclr", "byol"),
    reference="Han et al., FedX: Unsupervised Federated Learning with Cross Knowledge Distillation, ECCV 2022",
)
def fedx(experiment: Experiment) -> Method:
    """Two-sided distillation: from a client's own views and from the global model, by contrast and by relations."""
    aggregator = aggregators[experiment.aggregator or "fedavg"](experiment)
    return FedX(
        experiment,
        aggregator,
        stays=stays_for(experiment),
        scratch=("teacher",),
        wants_others=True,
        least_spread=0.0003,  # projections come together in the first round, and part only later
    )
