"""Features brought to length 1, whatever their length."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["on_sphere"]


def on_sphere(features: Tensor) -> Tensor:
    """x/‖x‖ of each row x (N, D) that is not 0, also where ‖x‖² is beyond the numbers' range, as from 10¹⁹ in float32.

    Rows are first scaled by powers of two, which rounds nothing: the result is `normalize`'s, bit for bit, wherever
    that one is right.
    """
    exponent = torch.frexp(features.abs().amax(dim=1, keepdim=True)).exponent
    return F.normalize(torch.ldexp(features, -exponent.clamp(-126, 126)), dim=1)
