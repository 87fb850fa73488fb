"""An image encoder: float32 RGB images (N, 3, S, S) in [0, 1] → features (N, D).

This file needs torch and safetensors and nothing else. `load` builds the network that config.json describes and fills
it from encoder.safetensors, both beside this file; the result is an ordinary module that can be trained further.

It is a ResNet in CIFAR form, with a 3×3 stem and no max-pooling (He et al., Deep Residual Learning for Image
Recognition, CVPR 2016).
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

# name: (kind of block, blocks in each stage, stride of the stem)
ARCHITECTURES: dict[str, tuple[str, tuple[int, ...], int]] = {
    "tiny": ("basic", (1, 1, 1), 2),
    "resnet10": ("basic", (1, 1, 1, 1), 1),
    "resnet18": ("basic", (2, 2, 2, 2), 1),
    "resnet34": ("basic", (3, 4, 6, 3), 1),
    "resnet50": ("bottleneck", (3, 4, 6, 3), 1),
}


def load(folder: str | Path = Path(__file__).parent) -> Encoder:
    """The trained encoder in `folder`, ready for use."""
    config = json.loads(Path(folder, "config.json").read_text(encoding="utf-8"))
    with torch.device("meta"):  # takes no memory: a network is no larger than the file of its weights
        encoder = Encoder(config["encoder"], config["width"], config["mean"], config["std"])
    encoder.load_state_dict(load_file(Path(folder, "encoder.safetensors")), assign=True)
    return encoder.eval()


class Encoder(nn.Module):
    """Normalises images and encodes them; stage i has `width`·2^i channels. `features` is the size D of the output."""

    def __init__(self, architecture: str, width: int, mean: float, std: float) -> None:
        super().__init__()
        kind, depths, stem_stride = ARCHITECTURES[architecture]
        block = Basic if kind == "basic" else Bottleneck
        self.width, self.mean, self.std = width, mean, std
        self.stem = nn.Sequential(_conv(3, width, 3, stem_stride), nn.BatchNorm2d(width), nn.ReLU())
        stages = []
        inputs = width
        for i, depth in enumerate(depths):
            blocks = []
            for j in range(depth):
                blocks.append(block(inputs, width * 2**i, 2 if i > 0 and j == 0 else 1))
                inputs = width * 2**i * block.expansion
            stages.append(nn.Sequential(*blocks))
        self.stages = nn.Sequential(*stages)
        self.features = inputs

    def forward(self, images: Tensor) -> Tensor:
        """(N, 3, S, S) in [0, 1] → (N, D)."""
        maps = self.stages(self.stem((images - self.mean) / self.std))
        return torch.flatten(F.adaptive_avg_pool2d(maps, 1), 1)


class Basic(nn.Module):
    """Two 3×3 convolutions beside a shortcut."""

    expansion = 1

    def __init__(self, inputs: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = _conv(inputs, channels, 3, stride)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = _conv(channels, channels, 3)
        self.bn2 = nn.BatchNorm2d(channels)
        self.shortcut = _shortcut(inputs, channels, stride)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(y)) + self.shortcut(x))


class Bottleneck(nn.Module):
    """1×1, 3×3, 1×1 convolutions beside a shortcut; four times as many channels come out."""

    expansion = 4

    def __init__(self, inputs: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = _conv(inputs, channels, 1)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = _conv(channels, channels, 3, stride)
        self.bn2 = nn.BatchNorm2d(channels)
        self.conv3 = _conv(channels, channels * self.expansion, 1)
        self.bn3 = nn.BatchNorm2d(channels * self.expansion)
        self.shortcut = _shortcut(inputs, channels * self.expansion, stride)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)))
        y = F.relu(self.bn2(self.conv2(y)))
        return F.relu(self.bn3(self.conv3(y)) + self.shortcut(x))


def _conv(inputs: int, outputs: int, kernel: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False)


def _shortcut(inputs: int, outputs: int, stride: int) -> nn.Module:
    if inputs == outputs and stride == 1:
        return nn.Identity()
    return nn.Sequential(_conv(inputs, outputs, 1, stride), nn.BatchNorm2d(outputs))
