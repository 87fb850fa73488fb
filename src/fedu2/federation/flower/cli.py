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
Debug = Annotated[bool, typer.Option("--debug", help="show tracebacks")]


@app.callback()
def _needs_flower() -> None:
    try:
        import flwr  # noqa: F401
    except ImportError:
        raise UsageError("this needs Flower: pip install 'fedu2[flower]'") from None


@app.command()
def init(
    folder: Annotated[Path, typer.Argument(help="a new folder for the app")],
    settings: Assignments = None,
    config: Configuration = None,
    out: Annotated[Path | None, typer.Option(help="run directory at the server; default: run in the folder")] = None,
    debug: Debug = False,
) -> None:
    """Write a Flower app with this experiment, and a README with the commands that run it."""
    from fedu2.federation.flower.command import init_app

    init_app(Console(), folder, settings or [], config, out)


@app.command()
def keys(
    folder: Annotated[Path, typer.Argument(help="a new folder for keys and certificates")],
    node: Annotated[list[str], typer.Option(help="name of a site; may be repeated")],
    host: Annotated[list[str] | None, typer.Option(help="name or address of the server; may be repeated")] = None,
    days: Annotated[int, typer.Option(min=1, help="how long certificates are valid")] = 365,
    force: Annotated[bool, typer.Option("--force", help="replace earlier ones")] = False,
    debug: Debug = False,
) -> None:
    """Make a certificate authority for development, a server certificate, and a key pair for every site."""
    from fedu2.federation.flower.command import write_keys

    write_keys(Console(), folder, node, host or [], days, force)


@app.command()
def local(
    settings: Assignments = None,
    config: Configuration = None,
    nodes: Annotated[int, typer.Option(min=1, help="sites")] = 3,
    out: Annotated[
        Path | None, typer.Option(help="folder for the app, the run, keys and logs; default: a new one under runs/")
    ] = None,
    debug: Debug = False,
) -> None:
    """Try a whole secured deployment on this machine: a server and sites, with TLS and node keys."""
    from fedu2.federation.flower.command import deploy_here

    deploy_here(Console(), settings or [], config, nodes, out)
