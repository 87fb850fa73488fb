"""The rows of the tables: methods, what they all share, and what each has of its own.

The recipe is common to all. A method may tune one or two hyper-parameters of its own, and each gets the same number of
tries, the first with its authors' value: short runs of a small encoder on a quarter of the training images, judged by
the other three quarters, so that any CPU repeats them. The best of them is in `OWN`; a test holds it against the
records.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["BESIDE", "OWN", "RECIPE", "ROWS", "TRIES", "TRY_SETTINGS", "Row"]

RECIPE: dict[str, Any] = {
    "encoder": "resnet18",
    "rounds": 100,
    "local_epochs": 5,
    "batch_size": 128,
    "byol.momentum": 0.9,
    "optimizer.lr": 0.05,
    "optimizer.weight_decay": 5e-4,
    "optimizer.schedule": "cosine",
    "views.crop_scale": [0.2, 1.0],
    "views.size": 24,  # for speed: a round takes 0.7 of the time that 32 does (docs/research.md, section 5)
    "views.solarize": 0.2,
}

# What each method was tuned to, where that is not its default.
OWN: dict[str, dict[str, Any]] = {}

TRY_SETTINGS: dict[str, Any] = {
    "encoder": "tiny",
    "width": 16,
    "rounds": 8,
    "batch_size": 64,
    "data.validation": 0.75,
    "data.image_size": 24,
}


@dataclass(frozen=True)
class Row:
    """A method as tables show it."""

    title: str
    settings: Mapping[str, Any]


def _row(title: str, method: str, objective: str, **settings: Any) -> Row:
    return Row(title, {"method": method, "objective": objective, **OWN.get(method, {}), **settings})


ROWS: dict[str, Row] = {
    "fedsimsiam": _row("FedSimSiam", "fedsimsiam", "simsiam"),
    "feddecorr-simsiam": _row("FedDecorr-SimSiam", "feddecorr", "simsiam"),
    "fedu2-simsiam": _row("FedU²-SimSiam", "fedu2", "simsiam"),
    "fedsimclr": _row("FedSimCLR", "fedsimclr", "simclr"),
    "ldawa-simclr": _row("L-DAWA-SimCLR", "ldawa", "simclr"),
    "fedx-simclr": _row("FedX-SimCLR", "fedx", "simclr"),
    "fedu2-simclr": _row("FedU²-SimCLR", "fedu2", "simclr"),
    "fedbyol": _row("FedBYOL", "fedbyol", "byol"),
    "fedu-byol": _row("FedU-BYOL", "fedu", "byol"),
    "fedema-byol": _row("FedEMA-BYOL", "fedema", "byol"),
    "feddecorr-byol": _row("FedDecorr-BYOL", "feddecorr", "byol"),
    "ldawa-byol": _row("L-DAWA-BYOL", "ldawa", "byol"),
    "fedx-byol": _row("FedX-BYOL", "fedx", "byol"),
    "orchestra": _row("Orchestra", "orchestra", "orchestra"),
    "fedu2-byol-without-fur": _row("FedU²-BYOL without FUR", "fedu2", "byol", **{"fur.weight": 0}),
    "fedu2-byol-without-eua": _row("FedU²-BYOL without EUA", "fedu2", "byol", aggregator="fedavg"),
    "fedu2-byol": _row("FedU²-BYOL", "fedu2", "byol"),
    "fedalignuniform": _row("FedAlignUniform", "fedalignuniform", "alignuniform"),
    "ssd": _row("SSD", "ssd", "alignuniform"),
}
BESIDE = ("fedalignuniform", "ssd")  # not in the paper

# Row → three tries, the first with the default. What is found holds for all rows of the method. FedSimSiam and FedBYOL
# have nothing of their own: the momentum of BYOL's target is part of the recipe.
TRIES: dict[str, Sequence[Mapping[str, Any]]] = {
    "fedsimclr": [{"simclr.temperature": value} for value in (0.5, 0.2, 0.1)],
    "fedu-byol": [{"fedu.threshold": value} for value in (0.4, 0.2, 0.8)],
    "fedema-byol": [{"fedema.tau": value} for value in (0.7, 0.5, 0.9)],
    "feddecorr-byol": [{"feddecorr.weight": value} for value in (0.1, 0.01, 1.0)],
    "ldawa-byol": [
        {"ldawa.level": "tensor", "ldawa.renormalize": False},
        {"ldawa.level": "tensor", "ldawa.renormalize": True},
        {"ldawa.level": "model", "ldawa.renormalize": True},
    ],
    "fedx-byol": [{"fedx.temperature": value} for value in (0.1, 0.2, 0.5)],
    "orchestra": [{"orchestra.temperature": value} for value in (0.1, 0.05, 0.2)],
    "fedu2-byol": [{"fur.weight": value} for value in (2.0, 1.0, 5.0)],
    "fedalignuniform": [{"alignuniform.weight": value} for value in (1.0, 0.5, 2.0)],
    "ssd": [{"ssd.scale": value} for value in (10.0, 3.0, 30.0)],
}
