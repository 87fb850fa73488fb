"""How far two encoders are apart, as FedU and FedEMA measure it.

    d(a, b) = (1/L) Σ_l ‖a_l − b_l‖₂      l = 1, ..., L: the weights of the encoder's convolutions, shortcuts left out

What a and b are is each method's option `divergence`:

    distance_to_global    the new global model and the client's last local one (the papers)
    last_drift            the start and the end of the client's last local training (the authors' code)

Reference: Zhuang et al., Collaborative Unsupervised Visual Representation Learning from Decentralized Data, ICCV 2021.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fedu2.errors import UsageError
from fedu2.models.flat import Entry, Layout

__all__ = ["divergence", "measured_layers"]

SHORTCUTS = {"shortcut", "downsample"}  # what they are called in our ResNets, and in torchvision's


def measured_layers(layout: Layout) -> tuple[Entry, ...]:
    """The encoder's convolutions beside its shortcuts: 17 of ResNet-18.

    Without any: its weights of two or more axes; without those, too: all of its parameters.
    """
    encoder = [entry for entry in layout.entries if entry.section == "encoder"]
    convolutions = [e for e in encoder if len(e.shape) == 4 and not SHORTCUTS.intersection(e.name.split("."))]
    layers = convolutions or [e for e in encoder if len(e.shape) >= 2] or encoder
    if not layers:
        raise UsageError("the divergence of two models is measured on their encoders, but this one has no parameters")
    return tuple(layers)


def divergence(a: Tensor, b: Tensor, layout: Layout) -> Tensor:
    """d(a, b), a scalar, for vectors that lie as `layout` says, at least as far as the encoder reaches."""
    norms = [torch.linalg.vector_norm(a[e.start : e.stop] - b[e.start : e.stop]) for e in measured_layers(layout)]
    return torch.stack(norms).mean()
