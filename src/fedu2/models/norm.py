"""Batch norm with what surrounds it in a ResNet: y = relu(norm(x) + residual).

A `Norm` has the parameters and buffers of `nn.BatchNorm2d` and computes the same. Two attributes change how:

groups: the batch is that many batches, stacked; each is normalised by its own statistics, as if they came one after
    another. Two views can then share one pass through a network (see `Objective.both`).
fused: on a GPU, training takes the kernels of `norm_kernel`, which read and write less; evaluation stays as it is.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

from fedu2.kernels import load
from fedu2.models.stem import Stem

__all__ = ["Chain", "Norm", "grouped", "only_our_norms", "second", "supported", "use_fused"]


class Norm(_BatchNorm):
    """Batch norm of (N, C) or (N, C, H, W), optionally followed by a sum and by ReLU."""

    groups: int = 1
    fused: bool = False

    def forward(self, x: Tensor, residual: Tensor | None = None, relu: bool = False) -> Tensor:
        """relu(norm(x) + residual), each part if asked for; `residual` has the shape of x."""
        if self.fused and self._fusible(x, residual):
            return self._fused(x, residual, relu)
        y = self._plain(x)
        if residual is not None:
            y = y + residual
        return F.relu(y, inplace=True) if relu else y

    def _plain(self, x: Tensor) -> Tensor:
        if self.groups == 1 or not self.training:
            return super().forward(x)
        self._check_groups(x)
        return torch.cat([super(Norm, self).forward(group) for group in x.chunk(self.groups)])

    def _check_groups(self, x: Tensor) -> None:
        if len(x) % self.groups:
            raise ValueError(f"a batch of {len(x)} is not {self.groups} batches of one size")

    def _fusible(self, x: Tensor, residual: Tensor | None) -> bool:
        remembers = self.track_running_stats and self.momentum is not None
        alike = residual is None or (residual.dtype == x.dtype and residual.shape == x.shape)
        return self.training and self.affine and remembers and alike and supported(x)

    def _fused(self, x: Tensor, residual: Tensor | None, relu: bool) -> Tensor:
        self._check_groups(x)
        if x.numel() == self.groups * x.shape[1]:
            raise ValueError(f"one value a channel has no variance: a batch of shape {tuple(x.shape)}")
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(self.groups)
        kernels = load("norm")
        assert kernels is not None
        y, again = kernels.norm(
            x, residual, self.weight, self.bias, self.running_mean, self.running_var,
            groups=self.groups, momentum=self.momentum, eps=self.eps, relu=relu,
        )  # fmt: skip
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            y.second = again
        return y  # type: ignore[no-any-return]

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() not in (2, 4):
            raise ValueError(f"expected (N, C) or (N, C, H, W), got {input.dim()} axes")


def second(x: Tensor) -> Tensor:
    """x, for its second reader: the output of a fused norm adds up the gradients of two readers in its own kernel."""
    return getattr(x, "second", x)


class Chain(nn.Sequential):
    """`nn.Sequential` in which a norm and the ReLU behind it are one step."""

    def forward(self, x: Tensor) -> Tensor:
        layers = list(self)
        for before, layer, after in zip([None, *layers], layers, [*layers[1:], None], strict=False):
            if isinstance(layer, Norm):
                x = layer(x, relu=isinstance(after, nn.ReLU))
            elif not (isinstance(layer, nn.ReLU) and isinstance(before, Norm)):
                x = layer(x)
        return x


@contextmanager
def grouped(module: nn.Module, groups: int) -> Iterator[None]:
    """Inside, every batch that `module` sees is `groups` batches, stacked."""
    norms = _norms(module)
    before = [norm.groups for norm in norms]
    for norm in norms:
        norm.groups = groups
    try:
        yield
    finally:
        for norm, was in zip(norms, before, strict=True):
            norm.groups = was


def use_fused(module: nn.Module, enabled: bool) -> None:
    """Let the layers of `module` that have kernels of their own take them where they can."""
    for child in module.modules():
        if isinstance(child, Norm | Stem):
            child.fused = enabled


def only_our_norms(module: nn.Module) -> bool:
    """Whether stacked batches stay apart in `module`: no layer but `Norm` takes statistics over a batch."""
    return all(isinstance(child, Norm) for child in module.modules() if isinstance(child, _NormBase))


def supported(x: Tensor) -> bool:
    """Whether the kernels take such an input: on a GPU, floating point, channels last in memory."""
    kernels = load("norm")
    return kernels is not None and bool(kernels.supported(x))


def _norms(module: nn.Module) -> list[Norm]:
    return [child for child in module.modules() if isinstance(child, Norm)]
