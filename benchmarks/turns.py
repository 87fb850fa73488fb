"""Where does the server overshoot? python -m benchmarks.turns [--out FILE] KEY=VALUE ...

Trains an experiment, and tells of every tensor in every round

    turn        the cosine between the move θ̄ − θ_s of this round and that of the round before: above 0 the server could
                have gone farther, below 0 what it overshot comes back; 0 is what an exact line search leaves
    agreement   the mean cosine between the updates of two clients
    length      ‖θ̄ − θ_s‖ / ‖θ_s‖

Tensors of fewer than 64 numbers are left out, and targets. What weight decay alone moves has a turn of 1. Keep
`server.until` at 1, or turns end with the long step.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedu2.aggregators import Aggregate, Updates, agreement
from fedu2.data import load_dataset, make_partition
from fedu2.engine import choose_device
from fedu2.evaluation.monitor import evaluate
from fedu2.experiment import Experiment
from fedu2.federation.callbacks import Callback
from fedu2.federation.local import LocalBackend
from fedu2.federation.rounds import initial_state, play_round
from fedu2.files import write_atomically
from fedu2.methods import build, resolve
from fedu2.models.flat import FlatModel

SMALLEST = 64

Figures = dict[str, float]
"""Of a tensor in a round: turn (but in the first), agreement, length."""


def watch(experiment: Experiment) -> Iterator[dict[str, Any]]:
    """Round after round: its number, figures by tensor, and kNN where the experiment asks for it."""
    device = choose_device(experiment.device)
    dataset = load_dataset(experiment.dataset, experiment.data)
    shares = make_partition(dataset, experiment)
    dataset = dataset.to(device)
    plain, caught = build(experiment), []

    def catch(updates: Updates) -> Aggregate:
        agreements = [agreement(_part(updates, part)) for part in spans.values()]
        sent = updates.start.clone()
        found = plain.aggregator(updates)
        caught.append((sent, found.params - sent, agreements))
        return found

    method = replace(plain, aggregator=catch)
    spans = {
        e.name: slice(e.start, e.stop)
        for e in method.layouts[0].entries
        if e.stop - e.start >= SMALLEST and e.stop <= method.trained
    }
    backend, state = LocalBackend(method, dataset.train, shares), initial_state(method, device)
    sizes, judged, before = [len(share) for share in shares], FlatModel(method.learner(), device), None
    for round_ in range(1, experiment.rounds + 1):
        state, _ = play_round(state, method, backend, sizes, Callback())
        sent, move, agreements = caught.pop()
        tensors = {
            name: _figures(sent[part], move[part], None if before is None else before[part], together)
            for (name, part), together in zip(spans.items(), agreements, strict=True)
        }
        before = move
        record: dict[str, Any] = {"round": round_, "tensors": tensors}
        if (every := experiment.evaluation.every) and round_ % every == 0:
            judged.load(state.server.model)
            record["knn"] = evaluate(judged.module, dataset, experiment)["knn"]
        yield record


def _part(updates: Updates, part: slice) -> Updates:
    return Updates(updates.start[part], updates.clients[:, part], updates.shares)


def _figures(sent: Tensor, move: Tensor, before: Tensor | None, together: float | None) -> Figures:
    found = {"length": float(move.norm() / sent.norm().clamp_min(1e-30))}
    if together is not None:
        found["agreement"] = together
    if before is not None:
        found["turn"] = float(torch.cosine_similarity(move.double(), before.double(), dim=0))
    return {name: round(value, 4) for name, value in found.items()}


def mean_turns(records: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The mean turn of each tensor over all rounds but the first."""
    turns = [record["tensors"] for record in records[1:]]
    return {name: statistics.fmean(tensors[name]["turn"] for tensors in turns) for name in turns[0]} if turns else {}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE")
    asked = parser.parse_intermixed_args(arguments)
    experiment = resolve(Experiment.parse({}, asked.settings))
    settings = {key: value for key, value in experiment.flat().items() if key != "data.root"}
    records = []
    for record in watch(experiment):
        records.append(record)
        print(record["round"], record.get("knn", ""), flush=True)
        if asked.out:
            write_atomically(asked.out, json.dumps({"experiment": settings, "rounds": records}) + "\n")
    for name, turn in mean_turns(records).items():
        print(f"{turn:6.2f}  {name}")


if __name__ == "__main__":
    main()
