"""What may change when a run goes on: whatever has no influence on the result, or says where it ends."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedu2.errors import UsageError
from fedu2.experiment import Experiment
from fedu2.methods import resolve

__all__ = ["FREE_KEYS", "KEPT_KEYS", "check_keys", "open_ended"]

# Keys that say nothing of what is trained.
FREE_KEYS = (
    "device",
    "checkpoint_every",
    "data.root",
    "data.download",
    "evaluation.",
    "engine.",
    "flower.min_",
    "flower.timeout",
    "flower.patience",
    "flower.server_data",
)
# Of these, what one run keeps: the rounding of a CPU, and what its kNN means.
KEPT_KEYS = ("engine.threads", "evaluation.k", "evaluation.temperature")


def check_keys(experiment: Experiment, begun: Mapping[str, Any], run: Path) -> None:
    """Refuse an experiment whose keys differ from those that a run or checkpoint began with."""
    ours = experiment.flat()
    begun = resolve(Experiment.parse(begun)).flat()  # keys that did not exist yet have their defaults
    free = (*FREE_KEYS, *(["rounds"] if open_ended(experiment) else []))
    fixed = [key for key in ours if key in KEPT_KEYS or not key.startswith(free)]
    changed = [key for key in fixed if begun.get(key) not in (ours[key], "auto")]
    if changed:
        shown = ", ".join(f"{key} was {begun.get(key)} and is now {ours[key]}" for key in changed[:3])
        more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
        why = "; its schedules end with the last round, so that it cannot be prolonged" if "rounds" in changed else ""
        raise UsageError(f"the run in {run} has another configuration: {shown}{more}{why}")


def open_ended(experiment: Experiment) -> bool:
    """Whether the number of rounds has no influence on any single round."""
    schedules = experiment.optimizer.schedule, experiment.byol.momentum_schedule, experiment.fur.schedule
    server = experiment.server
    steps = server.lr <= 1 or server.until == 1
    weights = experiment.aggregator not in (None, "eua") or experiment.eua.until == 1
    return all(schedule == "constant" for schedule in schedules) and steps and weights
