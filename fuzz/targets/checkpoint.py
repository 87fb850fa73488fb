"""Checkpoints: manifest and tensors in one input, divided by a line; checksums are made right, as an attacker would."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from safetensors.torch import save

from fedu2.experiment import Experiment
from fedu2.federation.checkpoint import Checkpoints, _fingerprint
from fedu2.models.flat import Layout
from fuzz.mutate import mutate_bytes, mutate_json

__all__ = ["mutate", "one_input", "seeds"]

LINE = b"\n-- 8< --\n"
NAMES = ("server.safetensors", "best.safetensors", "client-0001.safetensors", "velocity.safetensors")
LAYOUTS = (
    Layout.of([("encoder.weight", torch.zeros(2, 3)), ("head.weight", torch.zeros(4))]),
    Layout.of([("encoder.mean", torch.zeros(2))]),
)


def seeds() -> list[bytes]:
    """A whole one, one without a best round, and one of a format before."""
    weights = {"encoder.weight": torch.ones(2, 3), "head.weight": torch.ones(4), "encoder.mean": torch.ones(2)}
    velocity = {name: weights[name] for name in ("encoder.weight", "head.weight")}
    tensors = [
        save({**weights, "extra/a": torch.ones(3)}),
        save(weights),
        save({"memory": torch.ones(5)}),
        save(velocity),
    ]
    manifest = {"format": 2, "round": 1, "files": dict.fromkeys(NAMES), "experiment": Experiment().flat()}
    best = {"round": 0, "knn": 12.5}
    manifests = [{**manifest, "best": best}, {**manifest, "best": None}, {**manifest, "format": 1, "best": None}]
    return [LINE.join([json.dumps(told).encode(), *tensors]) for told in manifests]


def mutate(data: bytes, seeds: Sequence[bytes], chance: random.Random) -> bytes:
    """One of the files is spoiled; the header of a safetensors file as the JSON that it is."""
    parts = data.split(LINE)
    which = chance.randrange(len(parts))
    if which == 0:
        parts[0] = mutate_json(parts[0], seeds, chance)
    elif chance.random() < 0.5:
        size = 8 + int.from_bytes(parts[which][:8], "little")
        header = mutate_json(parts[which][8:size], seeds, chance)
        parts[which] = len(header).to_bytes(8, "little") + header + parts[which][size:]
    else:
        parts[which] = mutate_bytes(parts[which], seeds, chance)
    return LINE.join(parts)


def one_input(data: bytes) -> None:
    """As a run is resumed: the state, and the experiment that it belongs to."""
    manifest, *contents = data.split(LINE)
    with TemporaryDirectory() as folder:
        place = Path(folder, "round-000001")
        place.mkdir()
        for name, content in zip(NAMES, contents, strict=False):
            (place / name).write_bytes(content)
        (place / "manifest.json").write_bytes(_sealed(manifest, place))
        found = Checkpoints(Path(folder), *LAYOUTS).latest("cpu")
    if found is not None:
        Experiment.parse(found[1])


def _sealed(manifest: bytes, place: Path) -> bytes:
    """The manifest with the true size and checksum of every file that is there, where it is a manifest at all."""
    try:
        told = json.loads(manifest)
        told["files"] = {name: _fingerprint(place / name) if (place / name).is_file() else known
                         for name, known in told["files"].items()}  # fmt: skip
        return json.dumps(told).encode()
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OSError):
        return manifest
