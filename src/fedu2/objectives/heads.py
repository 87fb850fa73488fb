"""Projector and predictor of an experiment, sized after its encoder."""

from __future__ import annotations

from torch import nn

from fedu2.models import mlp
from fedu2.options import HeadOptions

__all__ = ["predictor", "projector", "rotation_head"]


def _sizes(encoder: nn.Module, options: HeadOptions) -> tuple[int, int, int]:
    features = int(encoder.features)  # type: ignore[arg-type]
    return features, options.hidden or 4 * features, options.out or features


def projector(encoder: nn.Module, options: HeadOptions) -> nn.Sequential:
    """G: D → hidden → d."""
    features, hidden, out = _sizes(encoder, options)
    return mlp(features, hidden, out)


def predictor(encoder: nn.Module, options: HeadOptions) -> nn.Sequential:
    """The predictor of SimSiam and BYOL: d → hidden → d."""
    _, hidden, out = _sizes(encoder, options)
    return mlp(out, hidden, out)


def rotation_head(encoder: nn.Module, options: HeadOptions) -> nn.Linear:
    """Which of four angles a projection comes from: d → 4."""
    return nn.Linear(_sizes(encoder, options)[2], 4)
