"""A federation small enough to be worked out by hand: a model of three parameters on images of one colour."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from fedu2.data import ImageSet
from fedu2.experiment import Experiment
from fedu2.federation.callbacks import Callback
from fedu2.federation.local import LocalBackend
from fedu2.federation.rounds import FederationState, initial_state, play_round
from fedu2.methods import Method
from fedu2.objectives import Objective, Outcome, objectives
from fedu2.objectives.byol import momentum_at


class _Theta(nn.Module):
    features = 3

    def __init__(self, values: Sequence[float]) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.tensor(values))

    def forward(self, x: Tensor) -> Tensor:
        return self.value.expand(len(x), 3)


@objectives.register("toy")
class Toy(Objective):
    """ℓ_a = ½‖θ − c‖² with c the mean colour of the first view; features and projections are θ for every image."""

    start_at = (0.0, 0.0, 0.0)

    def __init__(self, encoder: nn.Module, experiment: Experiment) -> None:
        super().__init__()
        self.encoder = _Theta(self.start_at)
        self.projector = nn.Identity()

    def forward(self, view1: Tensor, view2: Tensor) -> Outcome:
        loss = (self.encoder.value - view1.mean((0, 2, 3))).square().sum() / 2
        theta = self.encoder(view1)
        return Outcome(loss, (theta, theta), (theta, theta))


@objectives.register("toy-at-e1")
class ToyAtE1(Toy):
    """The same, starting at θ = (1, 0, 0), where a direction on the sphere is defined."""

    start_at = (1.0, 0.0, 0.0)


@objectives.register("toy-target")
class ToyWithTarget(Toy):
    """The same, followed by a target θ' ← ½ θ' + ½ θ."""

    def __init__(self, encoder: nn.Module, experiment: Experiment) -> None:
        super().__init__(encoder, experiment)
        self.target = _Theta(self.start_at).requires_grad_(False)

    @torch.no_grad()
    def start(self) -> None:
        self.target.value.copy_(self.encoder.value)

    @torch.no_grad()
    def after_step(self, progress: float) -> None:
        self.target.value.lerp_(self.encoder.value, 0.5)


@objectives.register("toy-scheduled")
class ToyScheduled(ToyWithTarget):
    """The same, with the target's momentum by BYOL's schedule."""

    def __init__(self, encoder: nn.Module, experiment: Experiment) -> None:
        super().__init__(encoder, experiment)
        self.options = experiment.byol

    @torch.no_grad()
    def after_step(self, progress: float) -> None:
        self.target.value.lerp_(self.encoder.value, 1 - momentum_at(self.options, progress))


def colours(*clients: tuple[int, tuple[int, int, int]]) -> tuple[ImageSet, list[Tensor]]:
    """Images of one colour per client, given as (number of images, RGB bytes), and the clients' shares."""
    images, shares, start = [], [], 0
    for count, rgb in clients:
        images.append(torch.tensor(rgb, dtype=torch.uint8).view(1, 3, 1, 1).expand(count, 3, 8, 8))
        shares.append(torch.arange(start, start + count))
        start += count
    return ImageSet(torch.cat(images).contiguous(), None), shares


def play(method: Method, images: ImageSet, shares: list[Tensor], rounds: int = 1) -> tuple[FederationState, list[dict]]:
    """Some rounds of a method on the toy federation."""
    backend = LocalBackend(method, images, shares)
    state, records = initial_state(method, "cpu"), []
    for _ in range(rounds):
        state, record = play_round(state, method, backend, [len(share) for share in shares], Callback())
        records.append(record)
    return state, records
