"""Encoders by name, and the MLP head that projector and predictor share.

An encoder is a module that maps images (N, 3, S, S) to features (N, D) and states D as its attribute `features`.
Register one of your own and use it as `encoder=mine`:

    @encoders.register("mine")
    def mine(width: int | None) -> nn.Module:
        ...
"""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from fedu2.errors import UsageError
from fedu2.models.norm import Chain, Norm
from fedu2.registry import Registry

__all__ = ["build_encoder", "encoders", "mlp"]

encoders: Registry[Callable[[int | None], nn.Module]] = Registry("encoder")


def build_encoder(name: str, width: int | None = None) -> nn.Module:
    """The encoder registered as `name`; `width` scales it (channels of its first stage; None: its own default)."""
    encoder = encoders[name](width)
    if not isinstance(getattr(encoder, "features", None), int):
        raise UsageError(f"encoder {name!r} must state the size of its output as an integer attribute `features`")
    return encoder


def mlp(inputs: int, hidden: int, outputs: int) -> nn.Sequential:
    """Linear → batch norm → ReLU → linear: projector G and predictor of SimSiam and BYOL."""
    return Chain(
        nn.Linear(inputs, hidden, bias=False),
        Norm(hidden),
        nn.ReLU(inplace=True),
        nn.Linear(hidden, outputs),
    )
