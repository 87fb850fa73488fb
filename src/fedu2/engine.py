"""What a run uses of the machine that it finds, and why.

Every fast path has a plain counterpart that gives the same result; `choose` decides from the experiment's `engine` keys
and the machine, and keeps a reason for each decision, which `fedu2 doctor` shows.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from fedu2.errors import UsageError, first_line
from fedu2.experiment import Experiment
from fedu2.kernels import why_not

__all__ = ["Engine", "choose", "choose_device", "choose_threads", "usable_cores", "without_graph"]

LANES = 3  # clients at once on one GPU; docs/performance.md has the measurements


@dataclass(frozen=True)
class Engine:
    """The decisions, with a reason for each."""

    device: torch.device
    precision: torch.dtype = torch.float32  # of forward passes; weights are always float32
    fused: bool = False  # hand-written kernels for batch norm, views and transport
    graph: bool = False  # the training step is captured and replayed
    compile: bool = False  # encoders without hand-written kernels go through torch.compile
    lanes: int = 1  # clients at once
    reasons: Mapping[str, str] = field(default_factory=dict)

    @property
    def device_name(self) -> str:
        """As a person would call it."""
        return torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "the CPU"

    def summary(self) -> str:
        """One line."""
        parts = [
            self.device_name,
            str(self.precision).removeprefix("torch."),
            *(["captured step"] if self.graph else []),
            *(["fused kernels"] if self.fused else []),
            *([f"{self.lanes} clients at once"] if self.lanes > 1 else []),
        ]
        return ", ".join(parts)


def choose_device(name: str) -> torch.device:
    """`auto` is the first CUDA device where there is one, else the CPU."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        available = getattr(torch.get_device_module(device), "is_available", lambda: True)()
        if available:
            torch.empty(1, device=device).add_(1).item()
    except RuntimeError as error:  # an unknown name, or an index beyond the last device
        raise UsageError(f"device={name} cannot be used on this machine: {first_line(error)}") from None
    if not available:
        raise UsageError(f"device={name} cannot be used on this machine: PyTorch finds no {device.type} device")
    return device


def choose_threads(asked: int | str) -> tuple[int, str]:
    """CPU threads, and why: as asked, as OMP_NUM_THREADS says, or one for every core that is idle now.

    Two threads that share a core wait for each other in every layer: slower than one of them alone.
    """
    if isinstance(asked, int):
        return asked, f"asked for by engine.threads={asked}"
    outer = os.environ.get("OMP_NUM_THREADS", "")
    if outer.isdigit() and int(outer) > 0:
        return int(outer), f"asked for by OMP_NUM_THREADS={outer}"
    cores, idle = usable_cores(), idle_cores()
    return max(1, min(round(cores), round(idle))), f"{idle:.1f} of {cores:g} cores were idle at the start"


def own_cores() -> set[int]:
    """The cores that this process may run on."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))


def idle_cores(seconds: float = 0.25) -> float:
    """How many of the own cores nobody else uses at the moment; all of them where the system does not tell."""

    def times() -> dict[int, tuple[int, int]]:  # by core: idle, all
        found = {}
        for line in Path("/proc/stat").read_text(encoding="ascii").splitlines():
            name, *counts = line.split()
            if name.startswith("cpu") and name[3:].isdigit():
                numbers = [int(count) for count in counts[:8]]
                found[int(name[3:])] = numbers[3] + numbers[4], sum(numbers)
        return found

    try:
        before = times()
        time.sleep(seconds)
        after = times()
        return sum((after[c][0] - before[c][0]) / max(1, after[c][1] - before[c][1]) for c in own_cores())
    except (OSError, ValueError, LookupError):
        return float(len(own_cores()))


def usable_cores() -> float:
    """Cores that this process may use: by affinity, and by the quota of a container."""
    cores = float(len(own_cores()))
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text(encoding="ascii").split()
        return cores if quota == "max" else min(cores, int(quota) / int(period))
    except (OSError, ValueError):
        return cores


def choose(experiment: Experiment, device: torch.device) -> Engine:
    """What `experiment` will use on `device`."""
    reasons: dict[str, str] = {"device": _why_device(experiment, device)}
    precision, reasons["precision"] = _precision(experiment, device)
    keys = experiment.engine
    fused, reasons["fused"] = _switch(keys.fused, why_not(device), "batch norm, views and transport in few kernels")
    cuda = None if device.type == "cuda" else "no CUDA device"
    graph, reasons["graph"] = _switch(keys.graph, cuda, "the whole training step is captured and replayed")
    compile_, reasons["compile"] = _switch(
        keys.compile, cuda, "for encoders without hand-written kernels; all of them if engine.fused is off"
    )
    lanes, reasons["lanes"] = _lanes(experiment, graph)
    return Engine(device, precision, fused, graph, compile_, lanes, reasons)


def without_graph(engine: Engine, experiment: Experiment) -> Engine:
    """The same where the step turned out not to be capturable."""
    lanes, reason = _lanes(experiment, graph=False)
    reasons = {**engine.reasons, "graph": "this step cannot be captured", "lanes": reason}
    return replace(engine, graph=False, lanes=lanes, reasons=reasons)


def _why_device(experiment: Experiment, device: torch.device) -> str:
    if experiment.device != "auto":
        return f"asked for by device={experiment.device}"
    return "the first CUDA device" if device.type == "cuda" else "no CUDA device was found"


def _precision(experiment: Experiment, device: torch.device) -> tuple[torch.dtype, str]:
    if experiment.precision != "auto":
        return getattr(torch, experiment.precision), f"asked for by precision={experiment.precision}"
    if device.type != "cuda":
        return torch.float32, "bfloat16 is slow on most CPUs"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return torch.float32, "this GPU is older than bfloat16 tensor cores"
    return torch.bfloat16, "tensor cores; weights, gradients' sums and losses stay float32"


def _switch(asked: bool, obstacle: str | None, reason: str) -> tuple[bool, str]:
    if not asked:
        return False, "switched off by its key"
    return (False, obstacle) if obstacle else (True, reason)


def _lanes(experiment: Experiment, graph: bool) -> tuple[int, str]:
    asked = experiment.engine.lanes
    if asked != "auto":
        return asked, f"asked for by engine.lanes={asked}"
    if not graph:
        return 1, "without captured steps the host is the bottleneck"
    if round(experiment.participation * experiment.clients) < LANES:
        return 1, "a round has too few clients"
    return LANES, "their kernels fill each other's gaps"
