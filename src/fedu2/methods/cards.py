"""Methods by name, and what an experiment leaves to its method."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from fedu2.aggregators import aggregators
from fedu2.errors import UsageError
from fedu2.experiment import Experiment
from fedu2.methods.base import Method
from fedu2.models import encoders
from fedu2.objectives import objectives
from fedu2.registry import Registry
from fedu2.views import views_for

__all__ = [
    "MethodCard",
    "build",
    "has_target",
    "left_out",
    "method",
    "methods",
    "plain_fedavg",
    "resolve",
    "stays_for",
    "title_of",
]


Target = Literal["shared", "local", "fresh"]
Compose = Callable[[Experiment], Method]


@dataclass(frozen=True)
class MethodCard:
    """A method's entry in the registry: how to build it, and what it is."""

    build: Compose
    title: str  # its name in print
    summary: str
    reference: str
    objectives: tuple[str, ...]  # the first is the default
    aggregator: str = "fedavg"
    target: Target = "local"  # of BYOL's target network
    rotation: float = 0.0  # weight of the rotation loss
    fur: bool = False  # whether its loss has FUR
    sends: str = ""  # beside encoder, heads and a shared target network
    remembers: str = ""  # beside a local target network
    plain: Mapping[str, Any] | None = None  # settings that turn it into plain FedAvg; None: the baseline it stands on
    parts: Mapping[str, str] = field(default_factory=dict)  # what each setting of `plain` takes away


methods: Registry[MethodCard] = Registry("method")


def method(
    name: str, *, title: str | None = None, objectives: tuple[str, ...], reference: str, **traits: Any
) -> Callable[[Compose], Compose]:
    """Decorator: register a function that composes a method; its docstring's first line is the summary.

    traits: further fields of its `MethodCard`.
    """

    def add(build: Compose) -> Compose:
        summary = (build.__doc__ or "").strip().splitlines()[0] if build.__doc__ else ""
        methods.register(name)(MethodCard(build, title or name, summary, reference, objectives, **traits))
        return build

    return add


def resolve(experiment: Experiment) -> Experiment:
    """The experiment with every choice that it leaves to its method filled in, and checked."""
    card = methods[experiment.method]
    objective = experiment.objective or card.objectives[0]
    objectives[objective]  # an unknown name explains itself
    if objective not in card.objectives:
        allowed = ", ".join(card.objectives)
        raise UsageError(f"method {experiment.method!r} does not go with objective={objective}: choose from {allowed}")
    aggregator = experiment.aggregator or card.aggregator
    aggregators[aggregator]
    encoders[experiment.encoder]
    views_for(experiment.views, objective)
    target = card.target if experiment.byol.target == "auto" else experiment.byol.target
    if not has_target(objective):
        target = "local"  # of no meaning then
    rotation = card.rotation if experiment.rotation.weight is None else experiment.rotation.weight
    falling = experiment.fur.schedule == "cosine"
    if experiment.fur.schedule == "auto":
        falling = card.fur and experiment.optimizer.schedule == "cosine"
    return experiment.with_(
        objective=objective,
        aggregator=aggregator,
        byol__target=target,
        rotation__weight=rotation,
        fur__schedule="cosine" if falling else "constant",
        fur__until=experiment.fur.until if falling else 1.0,  # of no meaning then
    )


def build(experiment: Experiment) -> Method:
    """The method of a resolved experiment."""
    return methods[experiment.method].build(experiment)


def plain_fedavg(experiment: Experiment) -> Experiment | None:
    """What to compare a resolved experiment with: the same without its method, averaged by FedAvg.

    None if it is that already, or if there is no plain method for its objective.
    """
    card = methods[experiment.method]
    baseline = f"fed{experiment.objective}"
    if card.plain is None and baseline not in methods:
        return None
    settings = card.plain if card.plain is not None else {"method": baseline, "aggregator": "fedavg"}
    plain = resolve(Experiment.parse({**experiment.flat(), **settings}))
    return None if plain == resolve(experiment) else plain  # a run of before may hold what has no meaning


def stays_for(experiment: Experiment) -> tuple[str, ...]:
    """The sections that do not travel: the target network of an objective that has one, unless it is shared."""
    keeps = has_target(experiment.objective or "byol") and experiment.byol.target != "shared"
    return ("target",) if keeps else ()


def has_target(objective: str) -> bool:
    """Whether an objective has a target network."""
    return bool(getattr(objectives[objective], "has_target", False))


def left_out(experiment: Experiment) -> list[str]:
    """The parts of its method that an experiment does without: ["FUR"], ["EUA"] or both for FedU²."""
    if experiment.method not in methods:
        return []
    card, settings = methods[experiment.method], experiment.flat()
    return [part for key, part in card.parts.items() if settings[key] == (card.plain or {})[key]]


def title_of(experiment: Experiment) -> str:
    """Such as FedU²-BYOL, or FedU²-BYOL without FUR; a name that says the objective, like FedBYOL, says it once."""
    method = methods[experiment.method].title if experiment.method in methods else experiment.method
    if _switched_off(experiment):
        method = "FedAvg"
    key = str(experiment.objective)
    objective = getattr(objectives[key], "__name__", key) if key in objectives else key
    title = method if method.endswith(objective) else f"{method}-{objective}"
    missing = [] if method == "FedAvg" else left_out(experiment)
    return f"{title} without {' and '.join(missing)}" if missing else title


def _switched_off(experiment: Experiment) -> bool:
    """Whether nothing is left of the method but its name, as in the run that `--compare` adds."""
    known = experiment.method in methods and methods[experiment.method].plain is not None
    return known and plain_fedavg(experiment) is None
