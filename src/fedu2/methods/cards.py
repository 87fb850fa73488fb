"""Methods by name, and what an experiment leaves to its method."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from fedu2.aggregators import aggregators
from fedu2.errors import UsageError
from fedu2.experiment import Experiment
from fedu2.methods.base import Method
from fedu2.models import encoders
from fedu2.objectives import objectives
from fedu2.registry import Registry
from fedu2.views import views_for

__all__ = ["MethodCard", "build", "method", "methods", "resolve", "stays_for"]


@dataclass(frozen=True)
class MethodCard:
    """A method's entry in the registry: how to build it, and what it is."""

    build: Callable[[Experiment], Method]
    summary: str
    reference: str
    objectives: tuple[str, ...]  # the first is the default
    aggregator: str
    target: Literal["shared", "local"]  # of BYOL's target network


methods: Registry[MethodCard] = Registry("method")


def method(
    name: str,
    *,
    objectives: tuple[str, ...],
    reference: str,
    aggregator: str = "fedavg",
    target: Literal["shared", "local"] = "local",
) -> Callable[[Callable[[Experiment], Method]], Callable[[Experiment], Method]]:
    """Decorator: register a function that composes a method; its docstring's first line is the summary."""

    def add(build: Callable[[Experiment], Method]) -> Callable[[Experiment], Method]:
        summary = (build.__doc__ or "").strip().splitlines()[0] if build.__doc__ else ""
        methods.register(name)(MethodCard(build, summary, reference, objectives, aggregator, target))
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
    return experiment.with_(objective=objective, aggregator=aggregator, byol__target=target)


def build(experiment: Experiment) -> Method:
    """The method of a resolved experiment."""
    return methods[experiment.method].build(experiment)


def stays_for(experiment: Experiment) -> tuple[str, ...]:
    """The sections that stay at the client: BYOL's target network, unless it is shared."""
    return ("target",) if experiment.objective == "byol" and experiment.byol.target == "local" else ()
