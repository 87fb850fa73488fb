"""Encoders F and the heads on top of them."""

from fedu2.models import resnet as _resnet  # registers the built-in encoders
from fedu2.models.base import build_encoder, encoders, mlp

__all__ = ["build_encoder", "encoders", "mlp"]

del _resnet

encoders.seal()
