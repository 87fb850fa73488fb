"""Representations of the same images by the global model and by clients' models, for figures.

Local models are gone once a round is over, so one more round of local training is played from the last checkpoint, by
the backend that trains. Nothing of it enters the run: neither its checkpoint nor its metrics change. The
features are kept in the run's `representations.safetensors`, and made anew when the run has gone on.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from fedu2.data import Dataset, ImageSet, load_dataset, make_partition
from fedu2.engine import choose_device
from fedu2.errors import TrainingError
from fedu2.evaluation.monitor import extract
from fedu2.experiment import Experiment
from fedu2.federation.batches import steps_of
from fedu2.federation.callbacks import Callback
from fedu2.federation.checkpoint import Checkpoints
from fedu2.federation.local import LocalBackend
from fedu2.federation.optimizers import learning_rate
from fedu2.federation.rounds import as_sent, participants
from fedu2.files import atomic_file, opened, read_bytes
from fedu2.methods import Task, build
from fedu2.models.flat import FlatModel
from fedu2.run import Run
from fedu2.rundir import RunDirectory

__all__ = ["FILE", "Snapshot", "evenly", "snapshot"]

log = logging.getLogger("fedu2")

FILE = "representations.safetensors"
FORMAT = "2"  # 1: local models were trained from the model that is judged, also where another was sent
MOST_CLIENTS = 10
MOST_IMAGES = 2000


@dataclass(frozen=True, eq=False)
class Snapshot:
    """Features of N images by the global model and by C clients' models after one round of local training."""

    round: int  # of the global model
    clients: tuple[int, ...]  # whose models these are, ascending
    features: Tensor  # (N, D) by the global model
    local: Tensor  # (C, N, D)
    labels: Tensor | None  # (N,)
    classes: tuple[str, ...]  # their names, where they have any
    tested: bool  # whether these are test images; else training images


def snapshot(run: Run, device: str = "auto") -> Snapshot:
    """The representations at the run's last checkpoint: those that were kept, or made now (as long as one round)."""
    tag = _tag(run.path)
    path = run.path / FILE
    kept = _read(path, tag)
    if kept is not None:
        return kept
    log.info("%s: one more round of local training, to see what clients make of the images", run.path)
    taken = _take(run, device)
    try:
        _write(path, tag, taken)
    except (OSError, SafetensorError) as error:
        log.warning("%s cannot be kept: %s", path, error)
    return taken


def evenly(count: int, most: int, labels: Tensor | None = None) -> Tensor:
    """At most `most` of `count` images, the same every time; each class in proportion where there are labels."""
    order = torch.arange(count) if labels is None else labels.cpu().argsort(stable=True)
    if count <= most:
        return torch.arange(count)
    return order[torch.linspace(0, count - 1, most, dtype=torch.float64).long()].sort().values


def _take(run: Run, device: str) -> Snapshot:
    experiment, place = run.experiment, choose_device(device)
    dataset = load_dataset(experiment.dataset, experiment.data)
    directory = RunDirectory(run.path)
    directory.check_same(experiment, dataset.digest())
    shares = directory.partition(len(dataset.train), lambda: make_partition(dataset, experiment))
    dataset = dataset.to(place)
    probes, tested = _probes(dataset)

    method = build(experiment.with_(device=device, precision="auto"))
    found = Checkpoints(run.path / "checkpoint", *method.layouts).latest(place)
    if found is None:
        raise _no_checkpoint(run.path)
    state = found[0]
    model = FlatModel(method.learner(), place)

    def features() -> Tensor:
        return extract(model.module.encoder, probes.images, experiment.evaluation.batch_size).cpu()

    model.load(state.server.model)
    by_global = features()
    by_client: dict[int, Tensor] = {}
    backend = LocalBackend(method, dataset.train, shares)
    tasks = _tasks(method.experiment, [len(share) for share in shares], state.round + 1)
    for reply in backend.run(tasks, as_sent(state, method).server, state.memories, Callback()):
        model.load(reply.model)
        by_client[reply.client] = features()
    clients = sorted(by_client)
    local = torch.stack([by_client[client] for client in clients])
    if not bool(by_global.isfinite().all() and local.isfinite().all()):
        raise TrainingError(f"the models of {run.path} give features that are not finite")
    labels = None if probes.labels is None else probes.labels.cpu()
    return Snapshot(state.round, tuple(clients), by_global, local, labels, dataset.classes, tested)


def _tasks(experiment: Experiment, examples: Sequence[int], round_: int) -> list[Task]:
    """The next round's largest clients. A run that is over goes on as in its last round: schedules end there."""
    drawn = participants(experiment, len(examples), round_)
    largest = sorted(sorted(drawn, key=lambda client: -examples[client])[:MOST_CLIENTS])
    steps, last = steps_of(examples, experiment), min(round_, experiment.rounds)
    lr, progress = learning_rate(experiment, last), (last - 1) / experiment.rounds
    return [Task(round_, client, steps[client], lr, progress) for client in largest]


def _probes(dataset: Dataset) -> tuple[ImageSet, bool]:
    """Test images, or training images where there are none; and which."""
    tested = len(dataset.test) > 1
    images = dataset.test if tested else dataset.train
    return images.subset(evenly(len(images), MOST_IMAGES, images.labels)), tested


def _no_checkpoint(path: Path) -> TrainingError:
    return TrainingError(f"{path} has no checkpoint yet, and so no model whose representations could be drawn")


def _tag(path: Path) -> str:
    """What the newest checkpoint is known by."""
    manifests = sorted((path / "checkpoint").glob("round-*/manifest.json"))
    if not manifests:
        raise _no_checkpoint(path)
    return hashlib.blake2b(read_bytes(manifests[-1]), digest_size=16).hexdigest()


def _write(path: Path, tag: str, taken: Snapshot) -> None:
    tensors = {"global": taken.features.contiguous(), "local": taken.local.contiguous()}
    if taken.labels is not None:
        tensors["labels"] = taken.labels.contiguous()
    about = {"round": taken.round, "clients": taken.clients, "classes": taken.classes, "tested": taken.tested}
    with atomic_file(path) as temporary:
        save_file(tensors, temporary, {"format": FORMAT, "checkpoint": tag, "about": json.dumps(about)})


def _read(path: Path, tag: str) -> Snapshot | None:
    """What was kept, if it is whole and belongs to the checkpoint that is known by `tag`."""
    try:
        with opened(path), safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            if (metadata.get("format"), metadata.get("checkpoint")) != (FORMAT, tag):
                return None
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
        about = json.loads(metadata["about"])
    except (OSError, SafetensorError, ValueError):
        return None
    return Snapshot(
        about["round"],
        tuple(about["clients"]),
        tensors["global"],
        tensors["local"],
        tensors.get("labels"),
        tuple(about["classes"]),
        about["tested"],
    )
