"""What the commands of `fedu2 flower` do, apart from parsing."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from fedu2.commands import experiment_from
from fedu2.errors import TrainingError
from fedu2.federation.flower.deployment import Config, Deployment
from fedu2.federation.flower.init import write_app
from fedu2.federation.flower.keys import LOOPBACK, make_keys
from fedu2.methods import title_of
from fedu2.run import Run
from fedu2.rundir import RunDirectory

__all__ = ["deploy_here", "init_app", "write_keys"]


def init_app(console: Console, folder: Path, settings: Sequence[str], config: Path | None, out: Path | None) -> None:
    """`fedu2 flower init`."""
    write_app(folder, experiment_from(settings, config), out)
    _tell(console, f"Written to {folder}; its README.md has the commands that run it.")


def write_keys(
    console: Console, folder: Path, nodes: Sequence[str], hosts: Sequence[str], days: int, force: bool
) -> None:
    """`fedu2 flower keys`."""
    made = make_keys(folder, nodes, [*hosts, *(host for host in LOOPBACK if host not in hosts)], days=days, force=force)
    _tell(console, f"For the server: {made.ca}, {made.certificate}, {made.certificate_key}")
    for name, private in made.nodes.items():
        _tell(console, f"For site {name}: {made.ca}, {private}; to be registered: {made.public(name)}")
    _tell(console, f"{made.ca_key} signs further certificates: keep it away from all of them.")


def deploy_here(console: Console, settings: Sequence[str], config: Path | None, nodes: int, out: Path | None) -> None:
    """`fedu2 flower local`: the app, keys, a server and sites; everything that was started is stopped."""
    experiment = experiment_from([f"clients={nodes}", *settings], config)
    place = (out or RunDirectory.new_name(experiment)).absolute()
    app = write_app(place / "app", experiment, place / "run")
    _tell(console, f"{title_of(experiment)}: a server and {nodes} sites on this machine → {place}")
    sites: list[Config] = [
        {"partition-id": number, "memory": str(place / "memory" / str(number))} for number in range(nodes)
    ]
    with Deployment(place / "deployment", sites) as deployment:
        _tell(console, f"{nodes} sites are connected to {deployment.address}, with TLS and keys of their own.")
        end = deployment.run(app, {}, lambda line: _tell(console, line) if "fedu2: " in line else None)
    if not end.completed:
        raise TrainingError(f"the run ended as {end.status}; logs are in {place / 'deployment' / 'logs'}")
    run = Run(place / "run")
    knn = f": kNN {run.summary['knn']:.1f} %" if "knn" in run.summary else ""
    _tell(console, f"All {run.summary['rounds']} rounds are played{knn}. Everything is stopped; the run is {run.path}.")


def _tell(console: Console, sentence: str) -> None:
    console.print(sentence, highlight=False, markup=False, soft_wrap=True)
