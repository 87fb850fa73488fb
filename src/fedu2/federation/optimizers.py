"""The clients' optimizers, and the learning rate over rounds."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch
from torch import nn

from fedu2.experiment import Experiment, OptimizerOptions

__all__ = ["learning_rate", "make_optimizer"]


def learning_rate(experiment: Experiment, round_: int) -> float:
    """The rate of round `round_` (from 1): constant, or lr · ½(1 + cos(π (r − 1)/R)); it does not move in a round."""
    options = experiment.optimizer
    if options.schedule == "constant":
        return options.lr
    return options.lr * (1 + math.cos(math.pi * (round_ - 1) / experiment.rounds)) / 2


def make_optimizer(parameters: Iterable[nn.Parameter], options: OptimizerOptions, lr: float) -> torch.optim.Optimizer:
    """A fresh optimizer; weight decay acts on all parameters, as in the field's code."""
    return _OPTIMIZERS[options.name](parameters, options, lr)


def _sgd(parameters: Iterable[nn.Parameter], options: OptimizerOptions, lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=lr, momentum=options.momentum, weight_decay=options.weight_decay)


def _adam(parameters: Iterable[nn.Parameter], options: OptimizerOptions, lr: float) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=lr, betas=options.betas, weight_decay=options.weight_decay)


def _adamw(parameters: Iterable[nn.Parameter], options: OptimizerOptions, lr: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=lr, betas=options.betas, weight_decay=options.weight_decay)


_OPTIMIZERS: dict[str, Callable[[Iterable[nn.Parameter], OptimizerOptions, float], torch.optim.Optimizer]] = {
    "sgd": _sgd,
    "adam": _adam,
    "adamw": _adamw,
}
