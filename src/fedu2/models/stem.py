"""The first convolution of a ResNet: `nn.Conv2d`, and on a GPU kernels that are made for three input channels.

With so few channels there is little to compute: a convolution could be as fast as its output is written, or its
gradient read. General ones are far from that (see `benchmarks/stem.py`).
"""

from __future__ import annotations

from torch import Tensor, nn

from fedu2.kernels import load

__all__ = ["Stem"]


class Stem(nn.Conv2d):
    """A convolution of images; `fused` lets it take the kernels, in half precision and where they fit."""

    fused: bool = False

    def forward(self, x: Tensor) -> Tensor:
        """(N, 3, H, W) → (N, O, H', W')."""
        kernels = load("stem") if self.fused and self._is_ordinary() else None
        if kernels is None or not kernels.supported(x, self.weight):
            return super().forward(x)
        return kernels.convolve(x, self.weight)  # type: ignore[no-any-return]

    def _is_ordinary(self) -> bool:
        """Stride 1, zeros around, no bias; `supported` sees to the rest."""
        options = (self.stride, self.padding, self.dilation, self.groups, self.padding_mode)
        return options == ((1, 1), (1, 1), (1, 1), 1, "zeros") and self.bias is None
