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
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from io import BytesIO
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from numpy.lib import format as npy
from torch import Tensor

from fedu2.errors import DataError
from fedu2.experiment import Experiment
from fedu2.files import parse_json
from fedu2.methods import Reply, ServerState, Task
from fedu2.models.flat import ModelState

__all__ = ["Assignment", "pack_assignment", "pack_reply", "pack_server", "pack_tensors", "unpack_assignment",
           "unpack_reply", "unpack_tensors"]  # fmt: skip

FORMAT = 1
RUN = re.compile(r"[A-Za-z0-9_-]{1,64}")  # what a federation can be called
MOST = 1 << 24  # no round, client or number of steps comes near it
PRIVATE = ("data.root", "split.file", "flower.server_data")  # keys that name files of the server's
HALF = ":bfloat16"  # behind the name of an array that holds bfloat16 as int16, which NumPy does not have


@dataclass(frozen=True, eq=False)
class Assignment:
    """What a site is asked to do. run: the name of the federation, by which memories of several are told apart."""

    run: str
    task: Task
    server: ServerState
    experiment: Experiment
    half: bool = False  # whether parameters travel in bfloat16


def told_experiment(experiment: Experiment) -> str:
    """The experiment as sites are told it: without what it says of the server's own files."""
    return json.dumps({key: value for key, value in experiment.flat().items() if key not in PRIVATE})


def pack_server(server: ServerState, half: bool) -> dict[str, ArrayRecord]:
    """The arrays that all sites get alike: packed once for a round, not once for each of them."""
    model = {"params": server.model.params, "buffers": server.model.buffers}
    return {"model": pack_tensors(model, half=("params",) if half else ()), "extra": pack_tensors(server.extra)}


def pack_assignment(assignment: Assignment, arrays: Mapping[str, ArrayRecord] | None = None) -> RecordDict:
    """For a site; `arrays` are those of `pack_server`, where they were packed before."""
    arrays = arrays or pack_server(assignment.server, assignment.half)
    told: dict[str, Any] = {
        "format": FORMAT,
        "run": assignment.run,
        "experiment": told_experiment(assignment.experiment),
        "half": assignment.half,
    }
    return RecordDict({**arrays, "task": ConfigRecord(told | asdict(assignment.task))})


def unpack_assignment(content: RecordDict) -> Assignment:
    """What the server asked for."""
    try:
        told = dict(content.config_records["task"])
        if told.pop("format", None) != FORMAT:
            raise DataError("the server speaks another version of this protocol: use the same fedu2 on both sides")
        run, half = str(told.pop("run")), bool(told.pop("half"))
        experiment = Experiment.parse(parse_json(str(told.pop("experiment"))))
        model, extra = (unpack_tensors(content.array_records[name]) for name in ("model", "extra"))
        server = ServerState(ModelState(model["params"], model["buffers"]), extra)
        task = Task(**told)  # type: ignore[arg-type]
        _check_task(task)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise DataError(f"what the server asks for is no task: {error}") from None
    if not RUN.fullmatch(run):  # it names a folder of the site's
        raise DataError(f"the server calls its federation {run[:40]!r}")
    return Assignment(run, task, server, experiment, half)


def _check_task(task: Task) -> None:
    whole, real = (task.round, task.client, task.steps), (task.lr, task.progress)
    if not all(type(number) is int and 0 <= number < MOST for number in whole):
        raise ValueError("round, client and steps are whole numbers")
    if not all(isinstance(number, int | float) and math.isfinite(number) for number in real):
        raise ValueError("lr and progress are numbers")


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
        numbers = {name: float(value) for name, value in metrics.items() if isinstance(value, int | float)}
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise DataError(f"its reply is not one: {error}") from None
    if told.get("format") != FORMAT:
        raise DataError("it speaks another version of this protocol")
    if set(model) != {"params", "buffers"}:
        raise DataError(f"its model has {', '.join(sorted(model)) or 'nothing'} in place of params and buffers")
    for name, expected in (("params", start.params), ("buffers", start.buffers)):
        _check(name, model[name], expected)
    if not all(bool(tensor.isfinite().all()) for tensor in payload.values()):
        raise DataError("its payload is not finite")
    if "loss" not in numbers or not all(math.isfinite(value) for value in numbers.values()):
        raise DataError("its loss is missing or not finite")
    if examples < 1 or samples < 0:
        raise DataError(f"it claims {examples} images")
    params = model["params"].to(start.params) + (start.params if assignment.half else 0)
    trained = ModelState(params, model["buffers"].to(start.buffers))
    payload = {name: tensor.to(start.params.device) for name, tensor in payload.items()}
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
        tensor = _tensor(array)
        if name.endswith(HALF):
            if tensor.dtype != torch.int16:
                raise ValueError(f"an array in bfloat16 is {tensor.dtype}")
            name, tensor = name.removesuffix(HALF), tensor.view(torch.bfloat16).float()
        tensors[name] = tensor
    return tensors


def _tensor(array: Array) -> Tensor:
    """The array that arrived, no larger than its bytes: a header that claims more, or another format, is refused.

    NumPy's own reader takes archives, too, and makes room for what a header claims before it looks for it.
    """
    stream = BytesIO(array.data)
    try:
        if npy.read_magic(stream) != (1, 0):
            raise ValueError("it has another version")
        shape, fortran_order, dtype = npy.read_array_header_1_0(stream)
        flat = np.frombuffer(array.data, dtype, offset=stream.tell())
        whole = flat.reshape(shape, order="F" if fortran_order else "C")
        return torch.from_numpy(whole.copy())  # what arrived cannot be written to
    except Exception:  # headers are Python's syntax, and fail in as many ways
        raise ValueError("an array cannot be read") from None


def _check(name: str, found: Tensor, expected: Tensor) -> None:
    if found.shape != expected.shape or found.dtype != expected.dtype:
        shapes = f"{found.dtype} {tuple(found.shape)} in place of {expected.dtype} {tuple(expected.shape)}"
        raise DataError(f"its {name} are {shapes}")
    if not bool(found.sum(dtype=torch.float64).isfinite()):  # one pass: what is not finite stays so in a sum
        raise DataError(f"its {name} are not finite")
