"""The clients' optimizers, and the learning rate over rounds."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from fedu2.experiment import Experiment
from fedu2.options import OptimizerOptions

__all__ = ["learning_rate", "make_optimizer", "restart"]


def learning_rate(experiment: Experiment, round_: int) -> float:
    """The rate of round `round_` (from 1): constant, or lr · ½(1 + cos(π (r − 1)/R)); it does not move in a round."""
    options = experiment.optimizer
    if options.schedule == "constant":
        return options.lr
    return options.lr * (1 + math.cos(math.pi * (round_ - 1) / experiment.rounds)) / 2


def make_optimizer(
    parameters: Iterable[nn.Parameter], options: OptimizerOptions, *, on_gpu: bool = False
) -> torch.optim.Optimizer:
    """An optimizer for one client after another; weight decay acts on all parameters, as in the field's code.

    On a GPU it runs as one kernel whose learning rate lies on the device, where a captured step finds the current one.
    """
    parameters = list(parameters)
    settings: dict[str, Any] = {"lr": options.lr, "weight_decay": options.weight_decay}
    if on_gpu:
        settings |= {"lr": torch.tensor(options.lr, device=parameters[0].device), "fused": True}
    if options.name == "sgd":
        return torch.optim.SGD(parameters, momentum=options.momentum, **settings)
    kind = torch.optim.AdamW if options.name == "adamw" else torch.optim.Adam
    return kind(parameters, betas=options.betas, capturable=on_gpu, **settings)


def restart(optimizer: torch.optim.Optimizer, lr: float) -> None:
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
