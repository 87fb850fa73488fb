"""The rotation task: Gidaris et al., Unsupervised Representation Learning by Predicting Image Rotations, ICLR 2018.

Orchestra and the FedU² authors' code add it to keep representations from degenerating; here any method can have it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fedu2.objectives import Objective

__all__ = ["rotation_loss", "turned"]


def rotation_loss(learner: Objective, view: Tensor, generator: torch.Generator) -> Tensor:
    """Cross entropy of head(G(F(x))) against the quarter turns that each view (N, 3, S, S) was given; a scalar."""
    turns = torch.randint(4, (len(view),), generator=generator, device=view.device)
    logits = learner.rotation(learner.projector(learner.encoder(turned(view, turns))))
    return F.cross_entropy(logits.float(), turns)


def turned(x: Tensor, turns: Tensor) -> Tensor:
    """Each image of (N, C, S, S) by its own number of quarter turns (N,), anticlockwise; the memory order stays."""
    quarters = torch.stack([torch.rot90(x, k, (2, 3)) for k in range(4)])  # (4, N, C, S, S)
    mixed = quarters[turns, torch.arange(len(x), device=x.device)]
    order = torch.channels_last if x.is_contiguous(memory_format=torch.channels_last) else torch.contiguous_format
    return mixed.contiguous(memory_format=order)
