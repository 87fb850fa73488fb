"""What the commands of `fedu2 flower` do, apart from parsing."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from fedu2.commands import experiment_from
from fedu2.errors import TrainingError, UsageError
from fedu2.experiment import Experiment
from fedu2.federation.flower.deployment import Config, Deployment
from fedu2.federation.flower.init import read_app, write_app
from fedu2.federation.flower.keys import LOOPBACK, Keys, make_keys, make_node_keys
from fedu2.federation.flower.server_app import STOPPED
from fedu2.methods import resolve, title_of
from fedu2.run import Run
from fedu2.rundir import RunDirectory

__all__ = ["add_keys", "deploy_here", "init_app", "write_keys"]


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
    _tell_nodes(console, made)
    _tell(console, f"{made.ca_key} is needed no more; whoever has it can pose as the server.")


def add_keys(console: Console, folder: Path, nodes: Sequence[str]) -> None:
    """`fedu2 flower keys --add`: the authority and the server's certificate stay as they are."""
    _tell_nodes(console, make_node_keys(folder, nodes))


def _tell_nodes(console: Console, keys: Keys) -> None:
    for name, private in keys.nodes.items():
        _tell(console, f"For site {name}: {keys.ca}, {private}; to be registered: {keys.public(name)}")


def deploy_here(
    console: Console,
    settings: Sequence[str],
    config: Path | None,
    nodes: int | None,
    data: Sequence[Path],
    out: Path | None,
) -> None:
    """`fedu2 flower local`: the app, keys, a server and sites; everything that was started is stopped."""
    count = _sites(nodes, data)
    experiment = _for_sites(settings, config, count)
    place = (out or RunDirectory.new_name(experiment)).absolute()
    app = _app(place, experiment)
    _tell(console, f"{title_of(experiment)}: a server and {_number(count, 'site')} on this machine → {place}")
    sites: list[Config] = [
        {"data": str(path.absolute()), "site": f"{number}-{path.absolute().name}"} for number, path in enumerate(data)
    ] or [{"partition-id": number} for number in range(count)]
    sites = [{**site, "memory": str(place / "memory" / str(number))} for number, site in enumerate(sites)]
    said: list[str] = []
    with Deployment(place / "deployment", sites) as deployment:
        _tell(console, f"{_number(count, 'site')} at {deployment.address}, with TLS and keys of their own.")
        end = deployment.run(app, {}, lambda line: _relay(console, line, said))
    if not end.completed:
        reason = said[-1].partition(STOPPED)[2] if said and STOPPED in said[-1] else f"it ended as {end.status}"
        raise TrainingError(f"{reason} (logs are in {place / 'deployment' / 'logs'})")
    run = Run(place / "run")
    knn = f": kNN {run.summary['knn']:.1f} %" if "knn" in run.summary else ""
    _tell(console, f"All {run.summary['rounds']} rounds are played{knn}. Everything is stopped; the run is {run.path}.")


def _sites(nodes: int | None, data: Sequence[Path]) -> int:
    if data and nodes not in (None, len(data)):
        raise UsageError(f"--nodes {nodes} and {len(data)} times --data: there is one folder for every site")
    return len(data) or nodes or 3


def _for_sites(settings: Sequence[str], config: Path | None, count: int) -> Experiment:
    """The experiment, with as many clients as there are sites, and content with them where they are few."""
    few = [f"flower.{key}={min(count, 2)}" for key in ("min_sites", "min_replies")]
    experiment = experiment_from([f"clients={count}", *few, *settings], config)
    if experiment.clients != count:
        raise UsageError(f"clients={experiment.clients}, but there are {_number(count, 'site')}: leave clients out")
    if experiment.flower.min_sites > count:
        raise UsageError(f"flower.min_sites={experiment.flower.min_sites}, but there are {_number(count, 'site')}")
    return experiment


def _app(place: Path, experiment: Experiment) -> Path:
    """A new app, or the one of a run that was interrupted in `place`."""
    app = place / "app"
    if not (app / "pyproject.toml").exists():
        return write_app(app, experiment, place / "run")
    if read_app(app) != resolve(experiment):
        raise UsageError(f"{place} has a run with other settings: choose another --out")
    return app


def _relay(console: Console, line: str, said: list[str]) -> None:
    """Of all that Flower prints, what is ours."""
    if "fedu2: " in line:
        said.append(line)
        _tell(console, line)


def _number(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def _tell(console: Console, sentence: str) -> None:
    console.print(sentence, highlight=False, markup=False, soft_wrap=True)
