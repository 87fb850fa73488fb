"""One round, aggregated in many ways: python -m benchmarks.one_round RUN [--out FILE]

The clients of a run play the round after its last checkpoint once; then every aggregator makes its own model of these
updates, which is judged by kNN. What is best here need not be best in the long run, but what is lost here was lost in
one step: how far to go, whom to listen to, and what batch-norm statistics a mean of models should have. And how much
the clients agree in each section of the model.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fedu2 import Run
from fedu2.aggregators import Aggregate, Updates, aggregators, agreement
from fedu2.aggregators.eua import eua
from fedu2.data import Dataset, load_dataset, make_partition
from fedu2.engine import choose_device
from fedu2.evaluation.monitor import evaluate
from fedu2.federation.callbacks import Callback
from fedu2.federation.checkpoint import Checkpoints
from fedu2.federation.local import LocalBackend
from fedu2.federation.rounds import play_round
from fedu2.federation.server_step import ahead, step
from fedu2.methods import build
from fedu2.models.flat import FlatModel, ModelState
from fedu2.options import EUAOptions, ServerOptions
from fedu2.resuming import open_ended
from fedu2.views import plain_view

FACTORS = (0.5, 1.0, 1.5, 2.0, 3.0)  # of the server's step
CALIBRATION = 40  # batches from which batch-norm statistics are taken anew


@dataclass(frozen=True, eq=False)
class Candidate:
    """A global model after the round."""

    name: str
    model: ModelState
    calibrate: bool = False  # with batch-norm statistics of its own, from training images of all clients


def candidates(updates: Updates) -> Iterator[Candidate]:
    """The models that the clients' updates could become."""
    assert updates.buffers is not None
    start, clients, buffers = updates.start, updates.clients, updates.buffers.clients
    shares = updates.shares.to(buffers)
    mean = ModelState(shares.to(clients) @ clients, shares @ buffers)
    yield Candidate("before", ModelState(start, updates.buffers.start))
    yield Candidate("before", ModelState(start, updates.buffers.start), calibrate=True)
    for factor in FACTORS:
        options = ServerOptions(lr=factor)
        params = ahead(*step(start, mean.params, None, options), options)
        yield Candidate(f"fedavg, server.lr={factor:g}", ModelState(params, mean.buffers))
        yield Candidate(f"fedavg, server.lr={factor:g}", ModelState(params, mean.buffers), calibrate=True)
    yield Candidate("equal weights", ModelState(clients.mean(0), buffers.mean(0)))
    for guard in (3.0, None):
        yield Candidate(f"eua, guard={guard}", ModelState(_unified(updates, guard), mean.buffers))
        longer = ModelState(_unified(updates, guard, "fedavg_norm"), mean.buffers)
        yield Candidate(f"eua, guard={guard}, as long as fedavg", longer)
        yield Candidate(f"eua by tensor, guard={guard}", ModelState(_by_tensor(updates, guard), mean.buffers))
    for client, (params, own) in enumerate(zip(clients, buffers, strict=True)):
        yield Candidate(f"client {client}", ModelState(params, own))


def _unified(updates: Updates, guard: float | None, length: Literal["convex", "fedavg_norm"] = "convex") -> Tensor:
    return eua(EUAOptions(guard=guard, step=length))(replace(updates, clients=updates.clients.clone())).params


def _by_tensor(updates: Updates, guard: float | None) -> Tensor:
    """EUA with a min-norm problem for each tensor."""
    params = updates.start.clone()
    for entry in updates.layout.entries:
        part = slice(entry.start, entry.stop)
        own = Updates(updates.start[part], updates.clients[:, part].clone(), updates.shares)
        params[part] = eua(EUAOptions(guard=guard))(own).params
    return params


def by_section(updates: Updates) -> dict[str, float | None]:
    """The agreement of the clients' updates in each section of the model."""
    spans = {name: updates.layout.span(name) for name in dict.fromkeys(e.section for e in updates.layout.entries)}
    return {
        name: agreement(Updates(updates.start[span], updates.clients[:, span], updates.shares))
        for name, span in spans.items()
    }


def played(
    run: Run, dataset: Dataset, shares: Sequence[Tensor], device: torch.device
) -> tuple[Updates, dict[str, Any]]:
    """The clients' updates in the round after the run's last checkpoint, and the record of that round."""
    experiment = run.experiment
    caught: list[Updates] = []

    def catch(updates: Updates) -> Aggregate:
        caught.append(replace(updates, clients=updates.clients.clone()))
        return aggregators["fedavg"](experiment)(updates)

    method = replace(build(experiment), aggregator=catch)
    found = Checkpoints(run.path / "checkpoint", *method.layouts).latest(device)
    if found is None:
        raise SystemExit(f"{run.path} has no checkpoint")
    backend = LocalBackend(method, dataset.train, shares)
    _, record = play_round(found[0], method, backend, [len(share) for share in shares], Callback())
    return caught[0], record


@torch.no_grad()
def calibrate(module: nn.Module, images: Tensor, batch_size: int) -> None:
    """Batch-norm statistics of the module on these images, in place of those that it has."""
    norms = [part for part in module.modules() if isinstance(part, nn.modules.batchnorm._BatchNorm)]
    usual = [norm.momentum for norm in norms]
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0)).to(images.device)
    module.train()
    for number, batch in enumerate(images[order[: CALIBRATION * batch_size]].split(batch_size), start=1):
        for norm in norms:
            norm.momentum = 1 / number  # the mean over batches
        module(plain_view(batch))
    for norm, momentum in zip(norms, usual, strict=True):
        norm.momentum = momentum


def compare(run: Run) -> dict[str, Any]:
    """All candidates after one round of a run, by kNN."""
    experiment = run.experiment
    if not open_ended(experiment) and run.finished:
        raise SystemExit(f"{run.path} is over: take one that was stopped before its last round")
    device = choose_device(experiment.device)
    dataset = load_dataset(experiment.dataset, experiment.data)
    shares = make_partition(dataset, experiment)
    dataset = dataset.to(device)
    updates, record = played(run, dataset, shares, device)
    model = FlatModel(build(experiment).learner(), device)
    found: dict[str, float] = {}
    for candidate in candidates(updates):
        model.load(candidate.model)
        if candidate.calibrate:
            calibrate(model.module.encoder, dataset.train.images, experiment.batch_size)
        name = candidate.name + (", own statistics" if candidate.calibrate else "")
        found[name] = evaluate(model.module, dataset, experiment)["knn"]
        print(f"{found[name]:6.2f}  {name}", flush=True)
    kept = {key: record[key] for key in ("round", "lr", "client_loss")}
    return {
        **kept,
        "images": [len(share) for share in shares],
        "agreement": agreement(updates),
        "agreement_by_section": by_section(updates),
        "knn": found,
        "experiment": experiment.flat(),
    }


def tell(compare: Callable[[Run], dict[str, Any]], about: str | None) -> None:
    """The command line of a comparison: RUN [--out FILE]."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    found = compare(Run(arguments.run))
    found["experiment"].pop("data.root")
    if arguments.out:
        arguments.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    tell(compare, __doc__)
