"""Assignments on the command line, one a line."""

from __future__ import annotations

from fedu2.evaluate import parse_protocols
from fedu2.experiment import Experiment
from fedu2.methods import resolve
from fuzz.mutate import mutate_text as mutate

__all__ = ["mutate", "one_input", "seeds"]


def seeds() -> list[bytes]:
    """Of every kind of key."""
    return [
        b"method=fedema\nseed=1",
        b"fur.weight=0\nviews.crop_scale=[0.2, 1]\noptimizer.betas=[0.9, 0.99]",
        b"data.root=/tmp/a=b\nlocal_steps=equal\nobjective=null",
        b"linear.epochs=100\nfinetune.fractions=[0.01, 0.1]",
        b"fur={weight: 1}\nfur.weight=2\noptimizer.lr=1e-3\nwidth=\nengine.threads=auto",
    ]


def one_input(data: bytes) -> None:
    """As `fedu2 train` and `fedu2 evaluate` take them."""
    assignments = data.decode("utf-8", "surrogateescape").split("\n")
    if assignments[0].startswith(("linear", "finetune", "knn")):
        parse_protocols(assignments)
    else:
        resolve(Experiment.parse({}, assignments)).to_yaml()
