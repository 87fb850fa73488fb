"""fedu2: federated unsupervised representation learning.

>>> import fedu2
>>> run = fedu2.train(fedu2.Experiment(method="fedu2", clients=5), out="runs/first")  # doctest: +SKIP
>>> run.summary["knn"]  # doctest: +SKIP

Heavy parts (torch among them) are imported when a name is first used, so that `import fedu2` is quick.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from fedu2._version import __version__

if TYPE_CHECKING:
    from fedu2.errors import FedU2Error
    from fedu2.experiment import Experiment
    from fedu2.run import Run, train

__all__ = ["Experiment", "FedU2Error", "Run", "__version__", "train"]

_HOMES = {"Experiment": "fedu2.experiment", "FedU2Error": "fedu2.errors", "Run": "fedu2.run", "train": "fedu2.run"}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'fedu2' has no attribute {name!r}")
