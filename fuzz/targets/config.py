"""Experiment files: YAML, and JSON, which is YAML."""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory

import yaml

from fedu2.experiment import Experiment
from fedu2.methods import resolve
from fuzz.mutate import mutate_json as mutate

__all__ = ["hostile", "mutate", "one_input", "seeds"]


def seeds() -> list[bytes]:
    """Small ones, one with aliases, and the complete one."""
    texts = [
        "method: fedu2\nclients: 3\nfur: {weight: 0.1}\n",
        "views: {crop_scale: [0.2, 1.0]}\noptimizer:\n  lr: 1e-3\n  betas: [0.9, 0.99]\n",
        "a: &a {lr: 0.1}\noptimizer: {<<: *a}\nlocal_steps: equal\n",
        "dataset: folder\ndata.root: ~/images\npartition: file\nsplit: {file: p.json}\n",
    ]
    whole = Experiment().model_dump(mode="json")
    return [*(text.encode() for text in texts), json.dumps(whole).encode(), Experiment().to_yaml().encode()]


def hostile() -> list[bytes]:
    """Little that becomes much, in the ways of YAML; itself in itself; numbers without end."""
    lists = [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 12)]
    groups = [f"a{n}: &a{n} {{{', '.join(f'k{k}: *a{n - 1}' for k in range(9))}}}" for n in range(1, 12)]
    merged = [f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 9)}]}}" for n in range(1, 12)]
    texts = ["\n".join([f"a0: &a0 {start}", *lines]) for start, lines in (("[x]", lists), ("{x: 1}", groups))]
    texts += ["\n".join(["a0: &a0 {x: 1}", *merged]), "fur: &a {weight: *a}", "fur: &a\n  <<: *a\n"]
    texts += [f"clients: 0x{'f' * 5000}", f"method: 0x{'f' * 5000}", "clients: " + "1:" * 50_000 + "1"]
    texts += ["a" * 300_000, "[" * 100_000, "a: 1\n" * 60_000, "? " * 5_000, "!!python/object/apply:os.system [ls]"]
    return [text.encode() for text in texts]


def one_input(data: bytes) -> None:
    """As `fedu2 train --config FILE` reads it; what is accepted can be written and read back."""
    with TemporaryDirectory() as folder:
        path = Path(folder, "config.yaml")
        path.write_bytes(data)
        experiment = Experiment.load(path)
    again = resolve(experiment)
    assert Experiment.parse(yaml.safe_load(again.to_yaml())) == again
