"""The network that is exported: float32 RGB images (N, 3, S, S) in [0, 1] → features (N, D), in plain layers."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from fedu2.experiment import Experiment
from fedu2.export.standalone import ARCHITECTURES, Encoder
from fedu2.models import build_encoder
from fedu2.views import MEAN, STD

__all__ = ["Network", "network_of"]


@dataclass(frozen=True, eq=False)
class Network:
    """module: the network, on the CPU, in evaluation mode.  size: S."""

    module: nn.Module
    size: int

    @cached_property
    def program(self) -> torch.export.ExportedProgram:
        """The traced network, for any number of images."""
        two = torch.zeros(2, 3, self.size, self.size)  # a batch of one would be taken for a constant
        batch = {0: torch.export.Dim("batch", min=1)}
        program = torch.export.export(self.module, (two,), dynamic_shapes={"images": batch}, strict=False)
        for part in program.graph_module.modules():
            for node in part.graph.nodes if isinstance(part, torch.fx.GraphModule) else ():
                node.meta.pop("stack_trace", None)  # names files and folders of this machine
        return program


class _Normalised(nn.Module):
    """An encoder of the user's own, behind the normalisation."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, images: Tensor) -> Tensor:
        features: Tensor = self.encoder((images - MEAN) / STD)
        return features


def network_of(encoder: nn.Module, experiment: Experiment) -> Network:
    """A clean copy of a trained encoder: weights that lie by themselves, and plain layers where it is one of ours."""
    name, state = experiment.encoder, {key: value.contiguous() for key, value in encoder.state_dict().items()}
    if name in ARCHITECTURES:
        module: nn.Module = Encoder(name, state["stem.0.weight"].shape[0], MEAN, STD)
        module.load_state_dict(state)
    else:
        copy = build_encoder(name, experiment.width)
        copy.load_state_dict(state)
        module = _Normalised(copy)
    return Network(module.eval().requires_grad_(False), experiment.data.image_size)
