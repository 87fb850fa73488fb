"""FUR as a term of a client's loss."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import normalize

from fedu2.objectives import Outcome
from fedu2.options import FUROptions
from fedu2.regularizers.fur import FURResult, cosine_distance, fur_toward, sphere_points
from fedu2.regularizers.transport import solve

__all__ = ["FUR", "weight_at"]


@dataclass(frozen=True)
class FUR:
    """λ_U (ℓ_u(Z¹) + ℓ_u(Z²)) on the projections or the features; the two views are solved in one batch."""

    options: FUROptions
    state: dict[str, Tensor] = field(default_factory=dict, compare=False, repr=False)

    def __call__(
        self, outcome: Outcome, generator: torch.Generator, progress: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The weighted term. Logged: means over the views of ℓ_u, matched mass, solver's gap; λ_U if it moves."""
        views = outcome.projections if self.options.output == "projector" else outcome.features
        result = self.result(torch.stack(views), generator)  # (2,) each
        logged = {
            "fur.loss": result.loss.detach().mean(),
            "fur.mass": result.mass.mean(),
            "fur.gap": result.gap.mean(),
        }
        weight = weight_at(self.options, progress)
        if isinstance(weight, Tensor):
            logged["fur.weight"] = weight
        return weight * result.loss.sum(), logged

    def result(self, z: Tensor, generator: torch.Generator) -> FURResult:
        """FUR of z (2, N, d), toward references by `draw`, beside points of `past` batches and of `others`."""
        n = z.shape[-2]
        with torch.no_grad():
            now = normalize(z.detach().float(), dim=-1, eps=1e-6)
            client = torch.tensor(generator.initial_seed() % 2**62)
            left = self.state.get("past", now[:, :0])
            if not torch.equal(self.state.get("client", client), client):
                # clients train in turn: the nine that trained last are the others of ten
                self.state["others"] = torch.cat([left[:, : 4 * n], self.state.get("others", left[:, :0])], -2)[:, : 9 * 4 * n]
                left = now[:, :0]
            self.state.update(client=client, past=torch.cat([now, left], -2)[:, : n * max(self.options.past, 4)])
            others = self.state.get("others", left[:, :0])
            some = torch.randperm(others.shape[-2], generator=generator)[: self.options.others]
            rivals = torch.cat([left[:, : n * self.options.past], others[:, some]], -2)
        points = torch.cat([z, rivals.to(z.dtype)], -2)
        references = self.references(points, now, generator)
        found = fur_toward(points, references, self.options)
        return FURResult(found.loss * (points.shape[-2] / n), found.mass, found.gap)

    def references(self, points: Tensor, now: Tensor, generator: torch.Generator) -> Tensor:
        """(2, M, d) fresh ones, or (M, d) that go on from step to step, whoever trains."""
        m, d = self.options.references or points.shape[-2], points.shape[-1]
        if self.options.draw == "fresh":
            return sphere_points((len(points), m, d), generator)
        rate = 1 / self.options.memory
        before = self.state.get("references")
        if before is None:
            after = sphere_points((m, d), generator)
        elif self.options.draw == "walk":  # autocorrelation exp(-steps / memory)
            after = normalize((1 - 2 * rate) ** 0.5 * before + (2 * rate) ** 0.5 * sphere_points((m, d), generator), dim=-1)
        else:
            one = torch.ones(())
            plan = solve(
                cosine_distance(now, before), one.expand(now.shape[-2]), one.expand(m), self.options.tau_a, self.options.tau_b
            ).plan.to(now.dtype)
            matched, mass = (plan.mT @ now).sum(0), plan.sum((0, -2)).unsqueeze(-1)
            after = normalize(before + rate * (matched - mass * before), dim=-1)
        self.state["references"] = after
        return after


def weight_at(options: FUROptions, progress: Tensor) -> float | Tensor:
    """λ_U: constant, or λ_U · ½(1 + cos(πp)) with p = progress/until, at most 1: it falls to 0, and stays there."""
    if options.schedule != "cosine":
        return options.weight
    return options.weight * (1 + torch.cos(torch.pi * (progress / options.until).clamp(max=1))) / 2
