"""What training will use of this machine, and a few steps to see that it works."""

from __future__ import annotations

import platform
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata

import torch

from fedu2._version import __version__
from fedu2.data import ImageSet
from fedu2.engine import Engine, choose, choose_device, choose_threads
from fedu2.experiment import Experiment
from fedu2.federation.callbacks import Callback
from fedu2.federation.local import LocalBackend
from fedu2.federation.rounds import initial_state
from fedu2.methods import Task, build

__all__ = ["Finding", "findings", "try_out", "version_of", "versions"]

STEPS = 10  # of the trial, after as many that do not count


@dataclass(frozen=True)
class Finding:
    """One decision."""

    what: str
    uses: str
    why: str


def findings(experiment: Experiment) -> tuple[Engine, list[Finding]]:
    """What `experiment` would use here."""
    device = choose_device(experiment.device)
    engine = choose(experiment, device)
    return engine, list(_explained(experiment, engine))


def _explained(experiment: Experiment, engine: Engine) -> Iterator[Finding]:
    why = engine.reasons
    yield Finding("device", engine.device_name, why["device"])
    yield Finding("precision", str(engine.precision).removeprefix("torch."), why["precision"])
    for name, on in (("graph", engine.graph), ("fused", engine.fused), ("compile", engine.compile)):
        yield Finding(f"engine.{name}", "yes" if on else "no", why[name])
    yield Finding("engine.lanes", str(engine.lanes), why["lanes"])
    if engine.device.type == "cpu":
        threads, reason = choose_threads(experiment.engine.threads)
        yield Finding("engine.threads", str(threads), reason)


def versions() -> str:
    """One line."""
    names = {"torch": torch.__version__, "CUDA": torch.version.cuda, "Triton": version_of("triton")}
    found = [f"{name} {version}" for name, version in names.items() if version]
    return f"fedu2 {__version__}, Python {platform.python_version()}, " + ", ".join(found)


def version_of(package: str) -> str | None:
    """The installed version, None if there is none."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def try_out(experiment: Experiment, engine: Engine) -> tuple[Engine, float]:
    """Train a few steps on noise: the engine that was left after what does not work, and milliseconds a step."""
    if engine.device.type == "cpu":
        torch.set_num_threads(choose_threads(experiment.engine.threads)[0])
    size, clients = experiment.data.image_size, engine.lanes
    count = clients * experiment.batch_size
    noise = torch.randint(0, 256, (count, 3, size, size), dtype=torch.uint8).to(engine.device)
    method = build(experiment)
    backend = LocalBackend(method, ImageSet(noise, None), list(torch.arange(count).chunk(clients)), engine)
    server = initial_state(method, engine.device).server
    tasks = [Task(1, client, STEPS, experiment.optimizer.lr, 0.0) for client in range(clients)]
    for _ in range(2):
        began = time.perf_counter()
        list(backend.run(tasks, server, {}, Callback()))
    return backend.engine, 1e3 * (time.perf_counter() - began) / (STEPS * clients)
