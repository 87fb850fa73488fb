"""The rows of the tables: methods, what they all share, and what each has of its own.

The recipe is common to all. A row may tune one or two hyper-parameters of its own, and each gets the same number of
tries, the first with its default: short runs of a small encoder on a quarter of the training images, judged by the
other three quarters, so that any CPU repeats them. What was better than the default by `MARGIN` is in `OWN`; a test
holds it against the records.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["BESIDE", "MARGIN", "OWN", "RECIPE", "ROWS", "ROW_TRY_SETTINGS", "TRIES", "TRY_SETTINGS", "Row"]

RECIPE: dict[str, Any] = {
    "encoder": "resnet18",
    "rounds": 60,
    "local_epochs": 5,
    "batch_size": 128,
    "byol.momentum": 0.9,
    "optimizer.lr": 0.05,
    "optimizer.weight_decay": 5e-4,
    "optimizer.schedule": "cosine",
    "views.crop_scale": [0.2, 1.0],
    "views.size": 24,  # for speed: a round takes 0.7 of the time that 32 does (docs/research/05-plain-methods-slow.md)
    "views.solarize": 0.2,
    # Four fifths of the rounds with a longer step, which heads do not bear (docs/research, 12 to 15)
    "server.lr": 2,
    "server.until": 0.8,
    "server.parts": "encoder",
}

# What rows were tuned to, where that is not their default.
OWN: dict[str, dict[str, Any]] = {
    "fedsimclr": {"simclr.temperature": 0.1},
    "feddecorr-simsiam": {"feddecorr.weight": 0.01},
    "feddecorr-byol": {"feddecorr.weight": 0.01},
    "fedx-byol": {"fedx.temperature": 0.5, "fedx.target_temperature": 0.5},
}
MARGIN = 1.0  # points of kNN by which a try must beat the default: one seed cannot tell less
OBJECTIVES = {"simclr": "fedsimclr", "alignuniform": "fedalignuniform"}  # the row that is tuned for all others with it

TRY_SETTINGS: dict[str, Any] = {
    "encoder": "tiny",
    "width": 16,
    "rounds": 8,
    "batch_size": 64,
    "data.validation": 0.75,
    "data.image_size": 24,
    "server.until": 1.0,
    "server.parts": "all",
    "server.lr": 1.0,  # tries are older than the recipe's longer step, and than a λ_U that falls: all rows alike
    "fur.schedule": "constant",
}
# Older than targets that stay, and than Orchestra's rate, too; tried anew, a row would have had more tries than others.
ROW_TRY_SETTINGS: dict[str, dict[str, Any]] = {
    "fedu2-byol": {"byol.target": "shared"},
    "orchestra": {"optimizer.lr": RECIPE["optimizer.lr"]},
}


@dataclass(frozen=True)
class Row:
    """A method as tables show it."""

    title: str
    settings: Mapping[str, Any]


def _row(name: str, title: str, method: str, objective: str, **settings: Any) -> tuple[str, Row]:
    """With what was tuned for its objective and for itself; an ablation has what the whole was tuned to."""
    shared, own = OBJECTIVES.get(objective, ""), name.partition("-without-")[0]
    tuned = {**OWN.get(shared, {}), **OWN.get(own, {})}
    return name, Row(title, {"method": method, "objective": objective, **tuned, **settings})


ROWS: dict[str, Row] = dict(
    [
        _row("fedsimsiam", "FedSimSiam", "fedsimsiam", "simsiam"),
        _row("feddecorr-simsiam", "FedDecorr-SimSiam", "feddecorr", "simsiam"),
        _row("fedu2-simsiam", "FedU²-SimSiam", "fedu2", "simsiam"),
        _row("fedsimclr", "FedSimCLR", "fedsimclr", "simclr"),
        _row("ldawa-simclr", "L-DAWA-SimCLR", "ldawa", "simclr"),
        _row("fedx-simclr", "FedX-SimCLR", "fedx", "simclr"),
        _row("fedu2-simclr", "FedU²-SimCLR", "fedu2", "simclr"),
        _row("fedbyol", "FedBYOL", "fedbyol", "byol"),
        _row("fedu-byol", "FedU-BYOL", "fedu", "byol"),
        _row("fedema-byol", "FedEMA-BYOL", "fedema", "byol"),
        _row("feddecorr-byol", "FedDecorr-BYOL", "feddecorr", "byol"),
        _row("ldawa-byol", "L-DAWA-BYOL", "ldawa", "byol"),
        _row("fedx-byol", "FedX-BYOL", "fedx", "byol"),
        # At the recipe's rate it learns nothing (docs/decisions/0021-orchestra-rate.md).
        _row("orchestra", "Orchestra", "orchestra", "orchestra", **{"optimizer.lr": 0.0125}),
        _row("fedu2-byol-without-fur", "FedU²-BYOL without FUR", "fedu2", "byol", **{"fur.weight": 0}),
        _row("fedu2-byol-without-eua", "FedU²-BYOL without EUA", "fedu2", "byol", aggregator="fedavg"),
        _row("fedu2-byol", "FedU²-BYOL", "fedu2", "byol"),
        _row("fedalignuniform", "FedAlignUniform", "fedalignuniform", "alignuniform"),
        _row("ssd", "SSD", "ssd", "alignuniform"),
    ]
)
BESIDE = ("fedalignuniform", "ssd")  # not in the paper
HARDER = (  # where clients have images of few classes
    "fedsimsiam",
    "fedu2-simsiam",
    "fedsimclr",
    "fedu2-simclr",
    "fedbyol",
    "fedu-byol",
    "fedema-byol",
    "fedu2-byol-without-fur",
    "fedu2-byol-without-eua",
    "fedu2-byol",
)

_DECORRELATION = [{"feddecorr.weight": value} for value in (0.1, 0.01, 1.0)]
_LDAWA = [
    {"ldawa.level": "tensor", "ldawa.renormalize": False},
    {"ldawa.level": "tensor", "ldawa.renormalize": True},
    {"ldawa.level": "model", "ldawa.renormalize": True},
]
_FEDX = [{"fedx.temperature": value, "fedx.target_temperature": value} for value in (0.1, 0.2, 0.5)]

# Row → three tries, the first with the default. FedSimSiam and FedBYOL have nothing of their own: the momentum of
# BYOL's target is part of the recipe.
TRIES: dict[str, Sequence[Mapping[str, Any]]] = {
    "fedsimclr": [{"simclr.temperature": value} for value in (0.5, 0.2, 0.1)],
    "fedalignuniform": [{"alignuniform.weight": value} for value in (1.0, 0.5, 2.0)],
    "feddecorr-simsiam": _DECORRELATION,
    "fedu2-simsiam": [{"fur.weight": value} for value in (2.0, 1.0, 0.5)],  # its loss has a quarter of BYOL's gradient
    "ldawa-simclr": _LDAWA,
    "fedx-simclr": _FEDX,
    "fedu2-simclr": [{"fur.weight": value} for value in (2.0, 1.0, 0.5)],
    # Always its own predictor, or always the global one: a threshold between depends on the size of the encoder.
    "fedu-byol": [{"fedu.threshold": value} for value in (0.4, 0.0, 1e6)],
    "fedema-byol": [{"fedema.tau": value} for value in (0.7, 0.5, 0.9)],
    "feddecorr-byol": _DECORRELATION,
    "ldawa-byol": _LDAWA,
    "fedx-byol": _FEDX,
    "orchestra": [{"orchestra.momentum": value} for value in (0.996, 0.99, 0.9)],
    "fedu2-byol": [{"fur.weight": value} for value in (2.0, 1.0, 5.0)],
    "ssd": [{"ssd.separation": value} for value in (1.0, 3.0, 10.0)],
}
