"""Exported packages: whether a folder is one, and the encoder in it, as the file in it reads it."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from safetensors import SafetensorError
from safetensors.torch import save

from fedu2.errors import UsageError
from fedu2.export import standalone
from fedu2.export.package import KIND, _check_place
from fuzz.mutate import mutate_bytes, mutate_json

__all__ = ["mutate", "one_input", "seeds"]

LINE = b"\n-- 8< --\n"
# encoder.py stands by itself, with Python's own errors; that memory ends, or time, is none of them.
REFUSALS = (KeyError, TypeError, ValueError, RuntimeError, AttributeError, OSError, SafetensorError)


def seeds() -> list[bytes]:
    """A whole package with a minute encoder."""
    facts = {"kind": KIND, "encoder": "tiny", "width": 1, "features": 4, "image_size": 8, "mean": 0.5, "std": 0.25}
    weights = standalone.Encoder("tiny", 1, 0.5, 0.25).state_dict()
    tensors = {name: tensor for name, tensor in weights.items() if tensor.is_floating_point()}
    return [json.dumps(facts).encode() + LINE + save(tensors), json.dumps({**facts, "encoder": "resnet50"}).encode()]


def mutate(data: bytes, seeds: Sequence[bytes], chance: random.Random) -> bytes:
    """The facts, or the weights."""
    facts, line, weights = data.partition(LINE)
    if chance.random() < 0.5 or not weights:
        return mutate_json(facts, seeds, chance) + line + weights
    return facts + line + mutate_bytes(weights, seeds, chance)


def one_input(data: bytes) -> None:
    """Both, one after the other."""
    facts, _, weights = data.partition(LINE)
    with TemporaryDirectory() as folder:
        Path(folder, "config.json").write_bytes(facts)
        Path(folder, "encoder.safetensors").write_bytes(weights)
        try:
            standalone.load(folder)
        except REFUSALS as error:
            if "memory" in str(error):
                raise MemoryError from error
        try:
            _check_place(Path(folder), force=True)
        except UsageError:
            return
