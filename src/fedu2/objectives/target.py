"""A target network: a copy of encoder and projector that follows them by a moving average."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

__all__ = ["Target"]


class Target(nn.Sequential):
    """θ', never trained. It normalises by batch statistics, as the online network θ does; its running ones are its own.

    The online encoder and projector are handed to each function, as a module that held them would own them, too.
    """

    def __init__(self, encoder: nn.Module, projector: nn.Module) -> None:
        super().__init__(copy.deepcopy(encoder), copy.deepcopy(projector))
        self.requires_grad_(False)

    @torch.no_grad()
    def start(self, encoder: nn.Module, projector: nn.Module) -> None:
        """θ' ← θ, batch-norm buffers included."""
        online = [*_parameters(encoder, projector), *encoder.buffers(), *projector.buffers()]
        for mine, its in zip([*self.parameters(), *self.buffers()], online, strict=True):
            mine.copy_(its)

    @torch.no_grad()
    def follow(self, encoder: nn.Module, projector: nn.Module, momentum: float) -> None:
        """θ' ← m θ' + (1 − m) θ."""
        torch._foreach_lerp_(list(self.parameters()), _parameters(encoder, projector), 1 - momentum)


def _parameters(encoder: nn.Module, projector: nn.Module) -> list[Tensor]:
    return [*encoder.parameters(), *projector.parameters()]
