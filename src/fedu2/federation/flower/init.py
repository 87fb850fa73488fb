"""A ready Flower app: `fedu2 flower init DIR` writes one that `flwr run` simulates and that deploys as it is."""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedu2._version import __version__
from fedu2.errors import UsageError
from fedu2.experiment import Experiment
from fedu2.files import read_text, write_atomically
from fedu2.methods import resolve, title_of

__all__ = ["app_config", "experiment_of", "read_app", "write_app"]

PACKAGE = "federation"

PYPROJECT = """# A federation of sites: {title}.
[project]
name = "{name}"
version = "1.0.0"
description = "{title} over Flower"
license = "Apache-2.0"
requires-python = ">=3.11"
dependencies = ["fedu2[flower]=={version}"]

[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[tool.hatch.build.targets.wheel]
packages = ["{package}"]

# Sites get the app's own files and nothing that lies beside them.
[tool.flwr.app]
publisher = "fedu2"
fab-include = ["README.md", "{package}/*.py"]

[tool.flwr.app.components]
serverapp = "{package}.server_app:app"
clientapp = "{package}.client_app:app"

# The experiment, as `fedu2 train --keys` explains it; `flwr run . --run-config "rounds=20"` lays others over it.
[tool.flwr.app.config]
{config}
"""

# Flower looks for an assignment; a name that is only imported it does not see.
COMPONENT = """from fedu2.federation.flower import {name}

app = {name}.app
"""

README = """# {title} over Flower

Written by fedu2 {version}. `pyproject.toml` has the experiment; the run goes to `{out}`.
If it is interrupted, the same `flwr run` goes on with it.

{simulation}## Deploy it

At the server, once:

    fedu2 flower keys keys --host SERVER --node north --node south

At the server:

    flower-superlink --host 0.0.0.0 --port 8000 --ssl-ca-certfile keys/ca.crt --ssl-certfile keys/server.pem \\
        --ssl-keyfile keys/server.key --enable-supernode-auth --disable-runtime-dependency-installation \\
        --database state.db

In `~/.flwr/config.toml`:

    [superlink.sites]
    address = "SERVER:8000"
    root-certificates = "/absolute/path/to/keys/ca.crt"

Make the sites known, each by its public key (in a directory without a folder called `sites`):

    flwr supernode register keys/north.pub sites
    flwr supernode register keys/south.pub sites

At each site, with its own private key and `ca.crt`:

    flower-supernode --superlink SERVER:8000 --root-certificates ca.crt --auth-supernode-private-key north \\
        --node-config "data='/path/to/images' site='north' memory='/path/for/its/memory'"

And then, at the server:

    flwr run {app} sites --stream
"""


SIMULATION = """## Simulate it

    pip install 'flwr[simulation]>=1.41,<1.43'
    export FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION=1
    flwr run {app} --stream --federation-config "num-supernodes={clients} client-resources-num-cpus=1"

Each node takes a partition of `dataset={dataset}`.

"""


def write_app(folder: Path, experiment: Experiment, out: Path | None = None) -> Path:
    """Write the app into `folder`, which is new or empty."""
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder} is a file: choose another folder")
    if folder.exists() and any(folder.iterdir()):
        raise UsageError(f"{folder} is not empty: choose another folder")
    experiment = resolve(experiment)
    out = (out or folder / "run").absolute()
    config = {"out": str(out), **app_config(experiment)}
    told = {
        "title": title_of(experiment),
        "version": __version__,
        "package": PACKAGE,
        "name": re.sub(r"[^a-z0-9]+", "-", folder.resolve().name.lower()).strip("-") or "federation",
        "config": "\n".join(f"{key} = {json.dumps(value, ensure_ascii=False)}" for key, value in config.items()),
        "out": out,
        "app": shlex.quote(str(folder)),
        "clients": experiment.clients,
        "dataset": experiment.dataset,
    }
    # With dataset=folder the images are the sites', and a simulated node has none.
    told["simulation"] = "" if experiment.dataset == "folder" else SIMULATION.format(**told)
    files = {
        "README.md": README.format(**told),
        f"{PACKAGE}/__init__.py": '"""What Flower starts, at the server and at the sites."""\n',
        f"{PACKAGE}/server_app.py": COMPONENT.format(name="server_app"),
        f"{PACKAGE}/client_app.py": COMPONENT.format(name="client_app"),
        "pyproject.toml": PYPROJECT.format(**told),
    }
    for name, text in files.items():
        write_atomically(folder / name, text)
    return folder


def read_app(folder: Path) -> Experiment:
    """The experiment of an app that `write_app` wrote."""
    path = folder / "pyproject.toml"
    try:
        config = tomllib.loads(read_text(path))["tool"]["flwr"]["app"]["config"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{path} is not the configuration of an app: {error}") from None
    return resolve(experiment_of({key: value for key, value in config.items() if key != "out"}))


def experiment_of(settings: Mapping[str, Any]) -> Experiment:
    """From Flower's flat configuration, in which lists are written as text."""
    plain = [f"{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in settings.items()]
    return Experiment.parse({}, plain)


def app_config(experiment: Experiment) -> dict[str, Any]:
    """What Flower's configuration can hold: words, numbers and truth values; lists go as text, None is left out."""
    usual = Experiment.parse({"dataset": experiment.dataset}).flat()
    always = ("method", "objective", "dataset", "clients", "rounds", "local_epochs", "batch_size", "encoder", "seed")
    chosen = {k: v for k, v in experiment.flat().items() if v is not None and (k in always or v != usual[k])}
    return {f'"{k}"' if "." in k else k: json.dumps(v) if isinstance(v, list) else v for k, v in chosen.items()}
