"""ResNets in CIFAR form: a 3×3 stem with stride 1 and no max-pooling, so that a 32-pixel image keeps its detail.

Reference: He et al., Deep Residual Learning for Image Recognition, CVPR 2016. ResNet-18 of width 64 has 11.17 M
parameters and 0.557 G multiply-adds a 32-pixel image.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedu2.models.base import encoders
from fedu2.models.norm import Chain, Norm, second
from fedu2.models.stem import Stem

__all__ = ["ResNet"]


def _conv(inputs: int, outputs: int, kernel: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False)


def _shortcut(inputs: int, outputs: int, stride: int) -> nn.Module:
    if inputs == outputs and stride == 1:
        return nn.Identity()
    return nn.Sequential(Pointwise(inputs, outputs, 1, stride, bias=False), Norm(outputs))


class Pointwise(nn.Conv2d):
    """A 1×1 convolution; of few channels, and trained on a CPU, it leaves out what its stride passes over beforehand.

    The same function. oneDNN's own way of doing so writes past its workspace in the gradient of the weights where
    channels are fewer than a vector register holds (uxlfoundation/oneDNN, issue 6035): with AVX2 and 4 channels,
    training ended in a segmentation fault.
    """

    REGISTER = 16  # floats in the widest

    def forward(self, x: Tensor) -> Tensor:
        if x.is_cuda or self.in_channels >= self.REGISTER or not torch.is_grad_enabled():
            return super().forward(x)
        rows, columns = self.stride
        return F.conv2d(x[..., ::rows, ::columns], self.weight, self.bias)


class BasicBlock(nn.Module):
    """Two 3×3 convolutions beside a shortcut."""

    expansion = 1

    def __init__(self, inputs: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = _conv(inputs, channels, 3, stride)
        self.bn1 = Norm(channels)
        self.conv2 = _conv(channels, channels, 3)
        self.bn2 = Norm(channels)
        self.shortcut = _shortcut(inputs, channels, stride)

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn1(self.conv1(x), relu=True)
        return self.bn2(self.conv2(y), self.shortcut(second(x)), relu=True)  # type: ignore[no-any-return]


class Bottleneck(nn.Module):
    """1×1, 3×3, 1×1 convolutions beside a shortcut; four times as many channels come out."""

    expansion = 4

    def __init__(self, inputs: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = _conv(inputs, channels, 1)
        self.bn1 = Norm(channels)
        self.conv2 = _conv(channels, channels, 3, stride)
        self.bn2 = Norm(channels)
        self.conv3 = _conv(channels, channels * self.expansion, 1)
        self.bn3 = Norm(channels * self.expansion)
        self.shortcut = _shortcut(inputs, channels * self.expansion, stride)

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn1(self.conv1(x), relu=True)
        y = self.bn2(self.conv2(y), relu=True)
        return self.bn3(self.conv3(y), self.shortcut(second(x)), relu=True)  # type: ignore[no-any-return]


class ResNet(nn.Module):
    """(N, 3, S, S) → (N, D); stage i has `width`·2^i channels and halves the resolution, but for the first.

    `stem_stride` 2 halves the resolution at once, for machines without an accelerator.
    """

    def __init__(
        self, block: type[BasicBlock] | type[Bottleneck], depths: Sequence[int], width: int, stem_stride: int = 1
    ) -> None:
        super().__init__()
        self.stem = Chain(Stem(3, width, 3, stem_stride, padding=1, bias=False), Norm(width), nn.ReLU(inplace=True))
        stages: list[nn.Module] = []
        inputs = width
        for i, depth in enumerate(depths):
            channels = width * 2**i
            blocks: list[nn.Module] = []
            for j in range(depth):
                blocks.append(block(inputs, channels, stride=2 if i > 0 and j == 0 else 1))
                inputs = channels * block.expansion
            stages.append(nn.Sequential(*blocks))
        self.stages = nn.Sequential(*stages)
        self.features = inputs
        self.apply(_initialise)

    def forward(self, x: Tensor) -> Tensor:
        return torch.flatten(F.adaptive_avg_pool2d(self.stages(self.stem(x)), 1), 1)


def _initialise(module: nn.Module) -> None:
    """He's initialisation for convolutions that are followed by ReLU."""
    if isinstance(module, nn.Conv2d):
        nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")


@encoders.register("tiny")
def tiny(width: int | None) -> nn.Module:
    """Three stages of one block at half resolution: the demonstration's encoder, for two CPU cores."""
    return ResNet(BasicBlock, (1, 1, 1), width or 32, stem_stride=2)


@encoders.register("resnet10")
def resnet10(width: int | None) -> nn.Module:
    """One block in each stage."""
    return ResNet(BasicBlock, (1, 1, 1, 1), width or 64)


@encoders.register("resnet18")
def resnet18(width: int | None) -> nn.Module:
    """The paper's encoder: 512 features."""
    return ResNet(BasicBlock, (2, 2, 2, 2), width or 64)


@encoders.register("resnet34")
def resnet34(width: int | None) -> nn.Module:
    """3, 4, 6 and 3 blocks."""
    return ResNet(BasicBlock, (3, 4, 6, 3), width or 64)


@encoders.register("resnet50")
def resnet50(width: int | None) -> nn.Module:
    """3, 4, 6 and 3 bottlenecks: 2048 features."""
    return ResNet(Bottleneck, (3, 4, 6, 3), width or 64)
