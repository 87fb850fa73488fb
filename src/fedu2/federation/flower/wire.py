"""What travels between server and sites, as Flower's records: arrays, numbers, a few words; no image and no label.

    to a site      "model" params (P,), buffers (Q,) · "extra" the method's own tensors · "task" round, client, steps,
                   lr, progress, experiment, run, half
    to the server  "model" params, buffers · "payload" the method's own tensors · "reply" examples, samples ·
                   "metrics" means of the terms of the loss

With `half`, parameters travel in bfloat16: θ_g to the sites, and back the update Δ_k = θ_k − θ_g as the site saw it, so
that rounding is relative to the update, and the server's own θ_g is never rounded.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from torch import Tensor

from fedu2.errors import DataError
from fedu2.experiment import Experiment
from fedu2.methods import Reply, ServerState, Task
from fedu2.models.flat import ModelState

__all__ = ["Assignment", "pack_assignment", "pack_reply", "pack_tensors", "unpack_assignment", "unpack_reply",
           "unpack_tensors"]  # fmt: skip

FORMAT = 1
HALF = ":bfloat16"  # behind the name of an array that holds bfloat16 as int16, which NumPy does not have


@dataclass(frozen=True, eq=False)
class Assignment:
    """What a site is asked to do. run: the name of the federation, by which memories of several are told apart."""

    run: str
    task: Task
    server: ServerState
    experiment: Experiment
    half: bool = False  # whether parameters travel in bfloat16


def pack_assignment(assignment: Assignment) -> RecordDict:
    """For a site."""
    server = assignment.server
    model = {"params": server.model.params, "buffers": server.model.buffers}
    told: dict[str, Any] = {
        "format": FORMAT,
        "run": assignment.run,
        "experiment": json.dumps(assignment.experiment.flat()),
        "half": assignment.half,
    }
    return RecordDict(
        {
            "model": pack_tensors(model, half=("params",) if assignment.half else ()),
            "extra": pack_tensors(server.extra),
            "task": ConfigRecord(told | asdict(assignment.task)),
        }
    )


def unpack_assignment(content: RecordDict) -> Assignment:
    """What the server asked for."""
    told = dict(content.config_records["task"])
    if told.pop("format", None) != FORMAT:
        raise DataError("the server speaks another version of this protocol: use the same fedu2 at server and sites")
    run, half = str(told.pop("run")), bool(told.pop("half"))
    experiment = Experiment.parse(json.loads(str(told.pop("experiment"))))
    model = unpack_tensors(content.array_records["model"])
    server = ServerState(ModelState(model["params"], model["buffers"]), unpack_tensors(content.array_records["extra"]))
    task = Task(**told)  # type: ignore[arg-type]
    return Assignment(run, task, server, experiment, half)


def pack_reply(reply: Reply, assignment: Assignment) -> RecordDict:
    """For the server; the site's memory stays behind."""
    params = reply.model.params.cpu()
    if assignment.half:
        params = params - assignment.server.model.params
    model = {"params": params, "buffers": reply.model.buffers}
    return RecordDict(
        {
            "model": pack_tensors(model, half=("params",) if assignment.half else ()),
            "payload": pack_tensors(reply.payload),
            "reply": ConfigRecord({"format": FORMAT, "examples": reply.examples, "samples": reply.samples}),
            "metrics": MetricRecord({name: float(value) for name, value in reply.metrics.items()}),
        }
    )


def unpack_reply(content: RecordDict, assignment: Assignment) -> Reply:
    """A site's answer, checked: what is not of the expected names, shapes and types, or not finite, is refused."""
    start = assignment.server.model
    try:
        model = unpack_tensors(content.array_records["model"])
        told, metrics = content.config_records["reply"], content.metric_records["metrics"]
        payload = unpack_tensors(content.array_records["payload"])
        examples, samples = int(told["examples"]), int(told["samples"])  # type: ignore[arg-type]
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(f"its reply is not one: {error}") from None
    if told.get("format") != FORMAT:
        raise DataError("it speaks another version of this protocol")
    if set(model) != {"params", "buffers"}:
        raise DataError(f"its model has {', '.join(sorted(model)) or 'nothing'} in place of params and buffers")
    for name, expected in (("params", start.params), ("buffers", start.buffers)):
        _check(name, model[name], expected)
    for name, tensor in payload.items():
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            raise DataError(f"its payload {name} is not finite")
    numbers = {name: float(value) for name, value in metrics.items() if isinstance(value, int | float)}
    if not all(math.isfinite(value) for value in numbers.values()) or "loss" not in numbers:
        raise DataError("its loss is missing or not finite")
    if examples < 1 or samples < 0:
        raise DataError(f"it claims {examples} images")
    params = model["params"].to(start.params) + (start.params if assignment.half else 0)
    trained = ModelState(params, model["buffers"].to(start.buffers))
    return Reply(assignment.task.client, examples, samples, trained, {}, numbers, payload)


def pack_tensors(tensors: Mapping[str, Tensor], half: tuple[str, ...] = ()) -> ArrayRecord:
    """Named tensors as arrays; those named in `half` are rounded to bfloat16."""
    arrays = {}
    for name, tensor in tensors.items():
        tensor = tensor.detach().cpu().contiguous()
        if name in half:
            name, tensor = name + HALF, tensor.to(torch.bfloat16).view(torch.int16)
        arrays[name] = Array(tensor.numpy())
    return ArrayRecord(arrays)


def unpack_tensors(record: ArrayRecord) -> dict[str, Tensor]:
    """The inverse of `pack_tensors`; bfloat16 comes back as float32."""
    tensors: dict[str, Tensor] = {}
    for name, array in record.items():
        found: np.ndarray[Any, Any] = np.array(array.numpy())  # a copy: what arrived cannot be written to
        tensor = torch.from_numpy(found)
        if name.endswith(HALF):
            name, tensor = name.removesuffix(HALF), tensor.view(torch.bfloat16).float()
        tensors[name] = tensor
    return tensors


def _check(name: str, found: Tensor, expected: Tensor) -> None:
    if found.shape != expected.shape or found.dtype != expected.dtype:
        shapes = f"{found.dtype} {tuple(found.shape)} in place of {expected.dtype} {tuple(expected.shape)}"
        raise DataError(f"its {name} are {shapes}")
    if not bool(found.isfinite().all()):
        raise DataError(f"its {name} are not finite")
