"""A run whose clients are sites: the same rounds, checkpoints and metrics, with Flower in place of a local backend.

The run directory is that of any run, with `sites.json` beside: the federation's name, and the client number that each
site keeps. A server that was killed goes on from its checkpoint when it is started again.
"""

from __future__ import annotations

import json
import logging
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flwr.serverapp import Grid

from fedu2.data import Dataset, datasets, load_dataset
from fedu2.engine import choose, choose_device
from fedu2.errors import TrainingError, UsageError
from fedu2.evaluation.monitor import evaluate
from fedu2.experiment import Experiment
from fedu2.federation.callbacks import Callback, Callbacks, TensorBoard
from fedu2.federation.checkpoint import places
from fedu2.federation.deadline import Deadline
from fedu2.federation.flower.backend import FlowerBackend, Roster
from fedu2.federation.play import Federation
from fedu2.files import digest_of, read_json, read_text, write_atomically
from fedu2.methods import ServerState, build, resolve
from fedu2.objectives import Objective
from fedu2.run import Run, environment
from fedu2.rundir import RunDirectory

__all__ = ["serve"]

log = logging.getLogger("fedu2")

SITES = "sites.json"
LOOK = 2.0  # seconds between two looks for sites that are missing
REMIND = 30.0  # seconds between two lines that say so


def serve(grid: Grid, experiment: Experiment, out: str | Path, *, callbacks: Sequence[Callback] = ()) -> Run:
    """Train over the sites that are connected to `grid`; a run that was begun in `out` goes on."""
    directory = RunDirectory(Path(out))
    resume = directory.begun()
    experiment = resolve(experiment)
    device = choose_device(experiment.device)
    engine = choose(experiment, device)
    # What the sites compute in is their own business; the server's aggregation is in float32 anyway.
    experiment = experiment.with_(precision=directory.config().precision if resume else experiment.precision)
    if resume:
        directory.check_same(experiment, None)
        if (played := _finished_after(directory)) >= experiment.rounds:
            raise UsageError(f"{directory.path} is finished, after round {played}: raise rounds, or choose another out")
    method = build(experiment)
    with directory.locked():
        roster, name = _roster(directory.path / SITES, bool(places(directory.path / "checkpoint")))
        backend = FlowerBackend(grid, experiment, name, roster)
        own = _own_data(experiment)
        data = None if own is None else own.to(device)

        def clients() -> dict[int, int]:
            _wait_for_sites(backend, experiment)
            _keep(directory.path / SITES, roster, name)
            return {number: card.examples for number, card in roster.cards.items()}

        def judge(learner: Objective, server: ServerState, round_: int) -> dict[str, float]:
            if data is not None:
                return evaluate(learner, data, experiment)
            backend.refresh()  # nobody is waited for: what was trained is to be saved
            return backend.judge(server, round_, int(learner.encoder.features))  # type: ignore[arg-type]

        clients()  # so that no round is charged with waiting for the first sites
        watch = Callbacks([*callbacks, TensorBoard()])
        federation = Federation(method, backend, clients, judge, directory, watch, device)
        told: dict[str, Any] = {"environment": environment(engine), "skipped_images": []}
        federation.play(resume, lambda: directory.create(experiment, None, None), Deadline(None), told)
    return Run(directory.path)


def _wait_for_sites(backend: FlowerBackend, experiment: Experiment) -> None:
    """Until enough are connected, or patience is at its end."""
    options = experiment.flower
    began, told = time.monotonic(), -REMIND
    backend.refresh()
    while (found := len(backend.roster.cards)) < options.min_sites:
        waited = time.monotonic() - began
        state = f"sites connected: {found}, needed: {options.min_sites} (flower.min_sites)"
        if waited - told >= REMIND:
            told = waited
            log.info("waiting for sites; %s", state)
        if not found and len(backend.roster.refused) >= options.min_sites:
            raise TrainingError(f"{state}: every node that is there was left out, see above")
        if waited > options.patience:
            raise TrainingError(f"{state}, after {options.patience:g} seconds")
        time.sleep(LOOK)
        backend.refresh()


def _finished_after(directory: RunDirectory) -> int:
    """The last round of a run that was finished, else 0."""
    try:
        return int(directory.summary()["rounds"])
    except TrainingError:
        return 0


def _own_data(experiment: Experiment) -> Dataset | None:
    """The server's own labelled images, where it has any."""
    where = experiment.flower.server_data
    if where is None:
        return None
    if where in datasets:
        return load_dataset(where, experiment.data)
    return load_dataset("folder", experiment.data.model_copy(update={"root": where, "layout": "images"}))


def _roster(path: Path, played: bool) -> tuple[Roster, str]:
    """The sites of earlier rounds, and the federation's name; both new where no round was played."""
    if not path.exists() and not played:
        return Roster(), uuid.uuid4().hex
    try:
        kept = read_json(path)
        whole = kept.pop("digest", None) in (None, digest_of(kept))  # earlier versions wrote none
        numbers = {str(site): int(number) for site, number in kept["clients"].items()}
        name = str(kept["federation"])
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        whole = False
    if not whole:
        raise TrainingError(f"{path} is damaged or missing: which site is which client cannot be told without it")
    return Roster(numbers=numbers), name


def _keep(path: Path, roster: Roster, name: str) -> None:
    content = {"federation": name, "clients": roster.numbers}
    text = json.dumps({**content, "digest": digest_of(content)}, indent=1) + "\n"
    if not path.exists() or read_text(path) != text:
        write_atomically(path, text)
