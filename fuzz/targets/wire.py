"""Messages of a Flower federation: what sites answer, at the server; what the server asks for, at a site.

An input is JSON that describes the records of a message; what Flower itself would not deliver is passed over.
"""

from __future__ import annotations

import base64
import json
import random
from collections.abc import Sequence
from io import BytesIO
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict

from fedu2.experiment import Experiment
from fedu2.federation.flower.backend import _card
from fedu2.federation.flower.wire import Assignment, pack_assignment, pack_reply, unpack_assignment, unpack_reply
from fedu2.methods import Reply, ServerState, Task
from fedu2.models.flat import ModelState
from fuzz.mutate import mutate_bytes, mutate_json

__all__ = ["hostile", "mutate", "one_input", "seeds"]

ASSIGNMENT = Assignment(
    "a" * 32,
    Task(1, 0, 3, 0.1, 0.0),
    ServerState(ModelState(torch.ones(6), torch.ones(2)), {"extra": torch.ones(3)}),
    Experiment(),
)


def seeds() -> list[bytes]:
    """A task, a reply, and a site's card."""
    model = ModelState(torch.zeros(6), torch.zeros(2))
    reply = Reply(0, 10, 20, model, {}, {"loss": 1.0}, {"payload": torch.ones(2, 2)})
    card = RecordDict({"site": ConfigRecord({"name": "north", "examples": 10, "judges": True})})
    contents = {"task": pack_assignment(ASSIGNMENT), "reply": pack_reply(reply, ASSIGNMENT), "card": card}
    return [json.dumps({"kind": kind, **_described(content)}).encode() for kind, content in contents.items()]


def hostile() -> list[bytes]:
    """An array that claims a terabyte, an archive in place of one, a federation whose name leads elsewhere."""
    task, reply = (json.loads(seed) for seed in seeds()[:2])
    claim = b"\x93NUMPY\1\0\x76\0" + b"{'descr': '<f4', 'fortran_order': False, 'shape': (250000000000,)}".ljust(118)
    packed = BytesIO()
    np.savez_compressed(packed, bomb=np.zeros(5_000_000))
    changed = []
    for data in (claim, packed.getvalue()):
        reply["arrays"]["model"]["params"][3] = base64.b64encode(data).decode()
        changed.append(json.dumps(reply).encode())
    for key, value in (("run", "../../elsewhere"), ("client", 10**12), ("experiment", "[" * 10_000)):
        told = {**task["configs"]["task"], key: value}
        changed.append(json.dumps({**task, "configs": {"task": told}}).encode())
    return changed


def _described(content: RecordDict) -> dict[str, Any]:
    arrays = {
        record: {
            name: [a.dtype, list(a.shape), a.stype, base64.b64encode(a.data).decode()] for name, a in arrays.items()
        }
        for record, arrays in content.array_records.items()
    }
    configs = {record: dict(values) for record, values in content.config_records.items()}
    metrics = {record: dict(values) for record, values in content.metric_records.items()}
    return {"arrays": arrays, "configs": configs, "metrics": metrics}


def mutate(data: bytes, seeds: Sequence[bytes], chance: random.Random) -> bytes:
    """The structure, or the bytes of an array, or the words of the experiment."""
    content = json.loads(data)
    if chance.random() < 0.4 and content["arrays"]:
        arrays = content["arrays"][chance.choice(list(content["arrays"]))]
        if arrays:
            array = arrays[chance.choice(list(arrays))]
            array[3] = base64.b64encode(mutate_bytes(base64.b64decode(array[3]), seeds, chance)).decode()
            return json.dumps(content).encode()
    if chance.random() < 0.3 and "experiment" in content["configs"].get("task", {}):
        task = content["configs"]["task"]
        task["experiment"] = mutate_json(task["experiment"].encode(), seeds, chance).decode("utf-8", "replace")
        return json.dumps(content).encode()
    return mutate_json(data, seeds, chance)


def one_input(data: bytes) -> None:
    """By what the message says it is."""
    try:
        told = json.loads(data)
        kind, content = told["kind"], _content(told)
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
        return  # nothing that Flower would deliver
    if kind == "task":
        unpack_assignment(content)
    elif kind == "card":
        _card(1, SimpleNamespace(content=content, has_error=lambda: False))  # type: ignore[arg-type]
    else:
        unpack_reply(content, ASSIGNMENT)


def _content(told: dict[str, Any]) -> RecordDict:
    records: dict[str, ArrayRecord | ConfigRecord | MetricRecord] = {}
    for record, arrays in told["arrays"].items():
        made = {
            name: Array(str(dtype), tuple(map(int, shape)), str(stype), base64.b64decode(content))
            for name, (dtype, shape, stype, content) in arrays.items()
        }
        records[record] = ArrayRecord(made)
    records |= {record: ConfigRecord(values) for record, values in told["configs"].items()}
    records |= {record: MetricRecord(values) for record, values in told["metrics"].items()}
    return RecordDict(records)
