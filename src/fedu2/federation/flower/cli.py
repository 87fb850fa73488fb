"""The command line of `fedu2 flower`: parses, calls the library, prints."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from fedu2.errors import UsageError

__all__ = ["app"]

app = typer.Typer(help="Federations of real sites over Flower, with TLS and node keys.")

Assignments = Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="settings, as for fedu2 train")]
Configuration = Annotated[Path | None, typer.Option(help="YAML file to start from")]
Out = Annotated[
    Path | None, typer.Option(help="folder for the app, the run, keys and logs; default: a new one under runs/")
]
Debug = Annotated[bool, typer.Option("--debug", help="show tracebacks")]


@app.command()
def init(
    folder: Annotated[Path, typer.Argument(help="a new folder for the app")],
    settings: Assignments = None,
    config: Configuration = None,
    out: Annotated[Path | None, typer.Option(help="run directory at the server; default: run in the folder")] = None,
    debug: Debug = False,
) -> None:
    """Write a Flower app with this experiment, and a README with the commands that run it."""
    _require_flower()
    from fedu2.federation.flower.command import init_app

    init_app(Console(), folder, settings or [], config, out)


@app.command()
def keys(
    folder: Annotated[Path, typer.Argument(help="a folder for keys and certificates")],
    node: Annotated[list[str], typer.Option(help="name of a site; may be repeated")],
    host: Annotated[list[str] | None, typer.Option(help="name or address of the server; may be repeated")] = None,
    days: Annotated[int, typer.Option(min=1, max=3650, help="how long certificates are valid")] = 365,
    add: Annotated[bool, typer.Option("--add", help="only key pairs of further sites, beside earlier ones")] = False,
    force: Annotated[bool, typer.Option("--force", help="replace earlier ones")] = False,
    debug: Debug = False,
) -> None:
    """Make a certificate authority for development, a server certificate, and a key pair for every site."""
    _require_flower()
    from fedu2.federation.flower.command import add_keys, write_keys

    if add:
        add_keys(Console(), folder, node)
    else:
        write_keys(Console(), folder, node, host or [], days, force)


@app.command()
def local(
    settings: Assignments = None,
    config: Configuration = None,
    nodes: Annotated[int | None, typer.Option(min=1, help="sites; default: 3")] = None,
    data: Annotated[list[Path] | None, typer.Option(help="images of a site, a folder; one for every site")] = None,
    out: Out = None,
    debug: Debug = False,
) -> None:
    """Try a whole secured deployment on this machine: a server and sites, with TLS and node keys.

    The same command with the same --out goes on with a run that was interrupted.
    """
    _require_flower()
    from fedu2.federation.flower.command import deploy_here

    deploy_here(Console(), settings or [], config, nodes, data or [], out)


def _require_flower() -> None:
    try:
        import flwr  # noqa: F401
    except ImportError:
        raise UsageError("this needs Flower: pip install 'fedu2[flower]'") from None
