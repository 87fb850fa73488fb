"""From an experiment to a run directory: `train`, and `Run`, which reads what was written.

config.yaml       the complete experiment, replayable
partition.json    which client holds which images
metrics.jsonl     a line a round; round 0 is the untrained encoder
checkpoint/       the federation's state after the last rounds
summary.json      written at the end
tensorboard/      the same numbers for TensorBoard
"""

from __future__ import annotations

import logging
import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedu2._version import __version__
from fedu2.data import Dataset, ImageSet, load_dataset, make_partition
from fedu2.engine import Engine, choose, choose_device, choose_threads, usable_cores
from fedu2.errors import DataError, TrainingError, UsageError
from fedu2.evaluation.monitor import evaluate
from fedu2.experiment import Experiment
from fedu2.federation import processes
from fedu2.federation.backend import Backend
from fedu2.federation.callbacks import Callback, Callbacks, TensorBoard
from fedu2.federation.checkpoint import Checkpoints
from fedu2.federation.deadline import Deadline
from fedu2.federation.local import LocalBackend
from fedu2.federation.play import Federation
from fedu2.federation.rounds import FederationState
from fedu2.files import user_path
from fedu2.methods import Method, build, resolve
from fedu2.models.flat import FlatModel
from fedu2.objectives import Objective
from fedu2.rundir import RunDirectory

__all__ = ["Run", "follow", "train"]

log = logging.getLogger("fedu2")

MakeBackend = Callable[[Method, ImageSet, Sequence[Tensor]], Backend]


def train(
    experiment: Experiment,
    out: str | Path | None = None,
    *,
    resume: bool = False,
    callbacks: Sequence[Callback] = (),
    backend: MakeBackend = LocalBackend,
    time_limit: float | None = None,
) -> Run:
    """Train one encoder over the clients of `experiment` and write everything under `out`.

    With `resume` a run that was interrupted goes on from its last checkpoint and ends as if it had not been. `backend`
    makes what executes the clients, from the method, the training images and the clients' shares of them. A run that
    would pass `time_limit` seconds stops after a round, with a checkpoint; `Run.finished` tells.

    Under torchrun the clients train in all its processes; only the first one returns, the others end with it.
    """
    if follow(backend):
        raise SystemExit
    if resume and not out:
        raise UsageError("to resume, name the run that is to go on")
    deadline = Deadline(time_limit)
    experiment = resolve(experiment)
    device = processes.own_device(choose_device(experiment.device))
    if experiment.data.root is not None:  # config.yaml must find them from other directories, too
        experiment = experiment.with_(data__root=str(user_path(experiment.data.root).absolute()))
    dataset = load_dataset(experiment.dataset, experiment.data)
    fingerprint = dataset.digest()
    resumed = RunDirectory(Path(out)) if resume and out else None
    shares = _shares(dataset, experiment, resumed)
    if experiment.partition == "file" or dataset.owners is not None:  # they bring their own number
        experiment = experiment.with_(clients=len(shares))
    dataset = dataset.to(device)

    experiment = _settled(experiment, device, resumed)
    if resumed:
        resumed.check_same(experiment, fingerprint)
    method = build(experiment)
    directory = resumed or RunDirectory(Path(out) if out else RunDirectory.new_name(experiment))
    with directory.locked():
        if resumed:
            directory.write_images(shares, fingerprint)  # whole again, if they were damaged
        clients = backend(method, dataset.train, shares)
        engine = clients.engine if isinstance(clients, LocalBackend) else choose(experiment, device)
        if group := processes.join():
            clients = group.lead(clients, experiment, shares)
        sizes = [len(share) for share in shares]

        def judge(learner: Objective, *_: Any) -> dict[str, float]:
            return evaluate(learner, dataset, experiment)

        watch = Callbacks([*callbacks, TensorBoard()])
        federation = Federation(method, clients, lambda: sizes, judge, directory, watch, device)
        told = {"environment": environment(engine), "skipped_images": list(dataset.skipped)}
        federation.play(resume, lambda: directory.create(experiment, shares, fingerprint), deadline, told)
    return Run(directory.path)


def follow(backend: MakeBackend = LocalBackend) -> bool:
    """Under torchrun all processes but the first train clients for it, until it is gone; whether this one did."""
    group = processes.join()
    if group is None or group.rank == 0:
        return False

    def prepare(experiment: Experiment, shares: Sequence[Tensor]) -> tuple[Backend, torch.device]:
        device = processes.own_device(choose_device(experiment.device))
        _settled(experiment, device, None)
        images = load_dataset(experiment.dataset, experiment.data).train.to(device)
        return backend(build(experiment), images, shares), device

    group.follow(prepare)
    return True


def _settled(experiment: Experiment, device: torch.device, resumed: RunDirectory | None) -> Experiment:
    """Decide what is left to the machine but influences rounding: a run keeps its precision and its CPU threads."""
    if resumed is not None and resumed.begun():
        kept = resumed.config()
        chosen = {"precision": kept.precision, "engine__threads": kept.engine.threads}
        asked = {"precision": experiment.precision, "engine__threads": experiment.engine.threads}
        experiment = experiment.with_(**{key: chosen[key] for key in chosen if asked[key] == "auto"})
    precision = str(choose(experiment, device).precision).removeprefix("torch.")
    experiment = experiment.with_(precision=precision)
    if device.type != "cpu":
        return experiment
    if precision == "bfloat16":
        log.warning("precision=bfloat16 is slow on most CPUs")
    threads, why = choose_threads(experiment.engine.threads)
    if experiment.engine.threads == "auto" and threads < round(usable_cores()):
        log.info("training on %d CPU thread%s: %s (engine.threads)", threads, "s" if threads > 1 else "", why)
    torch.set_num_threads(threads)
    return experiment.with_(engine__threads=threads)


def _shares(dataset: Dataset, experiment: Experiment, resumed: RunDirectory | None) -> list[Tensor]:
    """The clients' training images; a run that goes on keeps those that it began with."""

    def make() -> list[Tensor]:
        return make_partition(dataset, experiment)

    shares = resumed.partition(len(dataset.train), make) if resumed and resumed.begun() else make()
    names = dataset.client_names or tuple(str(k) for k in range(len(shares)))
    small = [names[k] for k, share in enumerate(shares) if len(share) < 2]
    if small:
        listed = ", ".join(small[:5]) + (f" and {len(small) - 5} more" if len(small) > 5 else "")
        raise DataError(f"a client needs at least two images to train; fewer have: {listed}")
    return shares


def environment(engine: Engine) -> dict[str, str]:
    """What a result may depend on beside its experiment."""
    device = engine.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    return {
        "fedu2": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "device": f"{device.type}: {name}",
        "threads": str(torch.get_num_threads()),
        "engine": engine.summary(),
    }


@dataclass(frozen=True)
class Run:
    """What a run directory holds."""

    path: Path

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", Path(self.path))  # a string will do

    @cached_property
    def experiment(self) -> Experiment:
        """The complete experiment."""
        return RunDirectory(self.path).config()

    @cached_property
    def history(self) -> list[dict[str, Any]]:
        """One record a round, from the untrained encoder (round 0) on."""
        return RunDirectory(self.path).history()

    @cached_property
    def summary(self) -> dict[str, Any]:
        """The figures of the finished run."""
        return RunDirectory(self.path).summary()

    @property
    def finished(self) -> bool:
        """Whether all rounds of the experiment have been played; a damaged summary does not say so."""
        try:
            return bool(self.summary["rounds"] >= self.experiment.rounds)
        except TrainingError:
            return False

    @property
    def rounds_played(self) -> int:
        """Up to the last checkpoint."""
        return self._last(build(self.experiment), "cpu").round

    @property
    def best_round(self) -> int:
        """The round with the highest kNN accuracy, up to the last checkpoint."""
        return self.model(best=True)[1]

    def learner(self, device: torch.device | str = "cpu", *, best: bool = False) -> Objective:
        """The global model of the last checkpoint, or of the best round by kNN, with its heads."""
        return self.model(device, best=best)[0]

    def model(self, device: torch.device | str = "cpu", *, best: bool = False) -> tuple[Objective, int]:
        """`learner`, and the round that it is of: read at once, for a run that trains goes on meanwhile."""
        method = build(self.experiment)
        state = self._last(method, device)
        if best and state.best is None:
            raise TrainingError(f"{self.path} has no best round: none was judged by kNN")
        round_, found = (
            (state.best.round, state.best.model) if best and state.best else (state.round, state.server.model)
        )
        model = FlatModel(method.learner(), device)
        model.load(found)
        return model.module.eval(), round_

    def _last(self, method: Method, device: torch.device | str) -> FederationState:
        found = Checkpoints(self.path / "checkpoint", *method.layouts).latest(device)
        if found is None:
            raise TrainingError(f"{self.path} has no checkpoint yet")
        return found[0]

    def encoder(self, device: torch.device | str = "cpu", *, best: bool = False) -> nn.Module:
        """The trained global encoder F, in evaluation mode: normalised images (N, 3, S, S) → features (N, D)."""
        return self.learner(device, best=best).encoder
