"""The clients' optimizers, and the learning rate over rounds."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.optim.sgd import sgd

from fedu2.experiment import Experiment
from fedu2.options import OptimizerOptions

__all__ = ["PlainSGD", "learning_rate", "make_optimizer", "restart"]


def learning_rate(experiment: Experiment, round_: int) -> float:
    """The rate of round `round_` (from 1): constant, or lr · ½(1 + cos(π (r − 1)/R)); it does not move in a round."""
    options = experiment.optimizer
    if options.schedule == "constant":
        return options.lr
    return options.lr * (1 + math.cos(math.pi * (round_ - 1) / experiment.rounds)) / 2


class PlainSGD:
    """torch.optim.SGD of one parameter, bit for bit: its function, without the class around it.

    At its first use any class of torch.optim imports torch's compiler, which takes as long as torch itself. Every
    process that trains would pay for that, and over Flower a site starts one for every message.
    """

    def __init__(self, parameter: Tensor, *, lr: float, momentum: float, weight_decay: float) -> None:
        self.parameter = parameter
        self.param_groups: list[dict[str, Any]] = [{"lr": lr, "momentum": momentum, "weight_decay": weight_decay}]
        self.state = {parameter: {"momentum_buffer": torch.zeros_like(parameter, requires_grad=False)}}

    @torch.no_grad()
    def step(self) -> None:
        """b ← μ b + g + λ θ, θ ← θ − lr · b, with g = `parameter.grad`."""
        assert self.parameter.grad is not None, "backward comes first"
        past = [buffer for state in self.state.values() for buffer in state.values()]
        (settings,) = self.param_groups
        fixed = {"dampening": 0, "nesterov": False, "maximize": False}
        sgd([self.parameter], [self.parameter.grad], past, foreach=False, **fixed, **settings)  # type: ignore[arg-type]


def make_optimizer(
    parameter: Tensor, options: OptimizerOptions, *, on_gpu: bool = False
) -> torch.optim.Optimizer | PlainSGD:
    """An optimizer for one client after another; weight decay acts on all parameters, as in the field's code.

    On a GPU it runs as one kernel whose learning rate lies on the device, where a captured step finds the current one.
    """
    settings: dict[str, Any] = {"lr": options.lr, "weight_decay": options.weight_decay}
    if options.name == "sgd" and not on_gpu:
        return PlainSGD(parameter, momentum=options.momentum, **settings)
    if on_gpu:
        settings |= {"lr": torch.tensor(options.lr, device=parameter.device), "fused": True}
    if options.name == "sgd":
        return torch.optim.SGD([parameter], momentum=options.momentum, **settings)
    kind = torch.optim.AdamW if options.name == "adamw" else torch.optim.Adam
    return kind([parameter], betas=options.betas, capturable=on_gpu, **settings)


def restart(optimizer: torch.optim.Optimizer | PlainSGD, lr: float) -> None:
    """Forget the past, in place: zeroed state is that of a fresh optimizer, for SGD with momentum and for Adam."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(lr)
        else:
            group["lr"] = lr
    for state in optimizer.state.values():
        for value in state.values():
            if isinstance(value, torch.Tensor):
                value.zero_()
