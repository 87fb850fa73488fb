"""The command line: parses, calls the library, prints."""

from __future__ import annotations

import io
import logging
import os
import sys
import traceback
from pathlib import Path
from typing import Annotated

import click
import typer
from rich.console import Console

from fedu2._version import __version__
from fedu2.errors import FedU2Error
from fedu2.federation.flower.cli import app as flower
from fedu2.files import shown
from fedu2.interrupts import one_at_a_time
from fedu2.paper.cli import app as paper

__all__ = ["main"]

app = typer.Typer(
    name="fedu2",
    help="Federated unsupervised representation learning: unlabeled images at many sites, one encoder.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)

app.add_typer(paper, name="paper")
app.add_typer(flower, name="flower")

Assignments = Annotated[
    list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="settings, such as method=fedu2 clients=10")
]


@app.command()
def train(
    settings: Assignments = None,
    config: Annotated[Path | None, typer.Option(help="YAML file to start from")] = None,
    out: Annotated[Path | None, typer.Option(help="run directory; default: a new one under runs/")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="go on with an interrupted run")] = False,
    compare: Annotated[bool, typer.Option("--compare", help="also train with plain FedAvg, at equal cost")] = False,
    report: Annotated[bool, typer.Option("--report", help="write the report page at the end")] = False,
    time_limit: Annotated[float | None, typer.Option(min=0, help="stop in time, with a checkpoint; in seconds")] = None,
    keys: Annotated[bool, typer.Option("--keys", help="list all keys with their defaults, and stop")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="show tracebacks")] = False,
) -> None:
    """Train one encoder over many clients; without arguments FedU²-BYOL on the embedded sample.

    Settings are KEY=VALUE, such as method=fedu2 objective=simclr clients=10 fur.weight=1; --keys lists them all.
    """
    from fedu2.commands import list_keys, run_training

    console = Console()
    if keys:
        list_keys(console)
    else:
        run_training(console, settings or [], config, out, resume, compare, report, time_limit)


@app.command()
def evaluate(
    run: Annotated[Path, typer.Argument(help="run directory")],
    settings: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="of protocols, such as linear.epochs=100")
    ] = None,
    protocol: Annotated[
        list[str] | None, typer.Option(help="knn, linear, finetune, supervised; may be repeated; default: all")
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="repetitions of what is random")] = 3,
    untrained: Annotated[bool, typer.Option("--untrained", help="judge the encoder as it was before training")] = False,
    best: Annotated[bool, typer.Option("--best", help="judge the encoder of the best round by kNN")] = False,
    data: Annotated[Path | None, typer.Option(help="labelled images: a folder with a sub-folder a class")] = None,
    holdout: Annotated[float | None, typer.Option(min=0.01, max=0.99, help="share of --data to test by")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, ...")] = "auto",
    debug: Annotated[bool, typer.Option("--debug", help="show tracebacks")] = False,
) -> None:
    """Judge the encoder of a run: nearest neighbours, linear probe, fine-tuning with few labels."""
    from fedu2.commands import judge_run

    judge_run(Console(), run, settings or [], protocol, seeds, untrained, best, data, holdout, device)


@app.command()
def figures(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="run directories, shown together")],
    out: Annotated[
        Path | None, typer.Option(help="folder for the files; default: figures in the run, or here for several runs")
    ] = None,
    figure: Annotated[
        list[str] | None,
        typer.Option(
            help="curves, spectrum, sphere, tsne, agreement, fur, eua, partition; may be repeated; default: all"
        ),
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, ...")] = "auto",
    debug: Annotated[bool, typer.Option("--debug", help="show tracebacks")] = False,
) -> None:
    """Draw what runs show, each figure as PNG and SVG; several runs are drawn side by side."""
    from fedu2.report.figures.command import draw_figures

    draw_figures(Console(), runs, out, figure, device)


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(help="run directories")],
    out: Annotated[
        Path | None, typer.Option(help="HTML file; default: report.html in the run, or here for several runs")
    ] = None,
    figures: Annotated[bool, typer.Option(help="also draw the representations, which takes a while")] = True,
    serve: Annotated[bool, typer.Option("--serve", help="show runs while they train, until Ctrl-C")] = False,
    port: Annotated[int, typer.Option(min=0, max=65535, help="of --serve; 0: any that is free")] = 0,
    debug: Annotated[bool, typer.Option("--debug", help="show tracebacks")] = False,
) -> None:
    """Write a page on one run or several: one HTML file with curves, figures and tables."""
    from fedu2.report.command import make_report

    make_report(Console(), runs, out, figures, serve, port)


@app.command()
def embed(
    run: Annotated[Path, typer.Argument(help="run directory")],
    images: Annotated[str, typer.Argument(help="a folder, an image, a list with a path a line, or - for such a list")],
    out: Annotated[Path, typer.Option(help="file for the vectors: .npz, .safetensors or .csv")],
    best: Annotated[bool, typer.Option("--best", help="by the encoder of the best round by kNN")] = False,
    normalize: Annotated[bool, typer.Option("--normalize", help="vectors of length 1")] = False,
    batch_size: Annotated[int, typer.Option(min=1, help="images a forward pass")] = 256,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, ...")] = "auto",
    force: Annotated[bool, typer.Option("--force", help="overwrite the file")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="show tracebacks")] = False,
) -> None:
    """Turn images of your own into vectors; interrupted, the same command goes on where it stopped.

    IMAGES is a folder, an image, a list with a path a line, or - for such a list on standard input.
    """
    from fedu2.embed.command import embed_images

    embed_images(
        Console(), run, images, out, best=best, normalize=normalize, batch_size=batch_size, device=device, force=force
    )


@app.command()
def export(
    run: Annotated[Path, typer.Argument(help="run directory")],
    format_: Annotated[
        list[str] | None, typer.Option("--format", help="safetensors (default), onnx, pt2; may be repeated")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="folder to write; default: export inside the run")] = None,
    best: Annotated[bool, typer.Option("--best", help="the encoder of the best round by kNN")] = False,
    force: Annotated[bool, typer.Option("--force", help="replace an earlier export")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="show tracebacks")] = False,
) -> None:
    """Write the encoder in a form that needs no fedu2, checked, with a model card."""
    from fedu2.export.command import export_run

    export_run(Console(), run, out, format_ or ["safetensors"], best, force)


@app.command()
def methods(debug: Annotated[bool, typer.Option("--debug", help="show tracebacks")] = False) -> None:
    """List the methods, with their objectives and references."""
    from fedu2.commands import list_methods

    list_methods(Console())


@app.command()
def datasets(debug: Annotated[bool, typer.Option("--debug", help="show tracebacks")] = False) -> None:
    """List the data sets, and where they are looked for."""
    from fedu2.commands import list_datasets

    list_datasets(Console())


@app.command()
def doctor(
    settings: Assignments = None,
    debug: Annotated[bool, typer.Option("--debug", help="show tracebacks")] = False,
) -> None:
    """Say what training will use of this machine, and why; settings are those of a run, such as engine.graph=false."""
    from fedu2.commands import examine

    examine(Console(), settings or [])


@app.callback(invoke_without_command=True)
def _root(version: Annotated[bool, typer.Option("--version", help="show the version, and stop")] = False) -> None:
    if version:
        typer.echo(f"fedu2 {__version__}")
        raise typer.Exit


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; 0 for success, 1 for failure, 2 for wrong usage, 130 when interrupted."""
    with one_at_a_time(to_the_end=arguments is None):
        return _carried_out((sys.argv[1:] if arguments is None else arguments) or ["--help"])


def _carried_out(arguments: list[str]) -> int:
    _prepare_output()
    _share_busy_cores()
    try:
        if _followed():
            return 0
        code = app(args=arguments, prog_name="fedu2", standalone_mode=False)
        if code == 130:  # the parser has swallowed Ctrl-C
            raise KeyboardInterrupt
    except FedU2Error as error:
        return _fail(error, str(error), error.exit_code, "--debug" in arguments)
    except click.ClickException as error:
        return _fail(error, f"{_once(error.format_message())} (see fedu2 --help)", 2, "--debug" in arguments)
    except (KeyboardInterrupt, click.Abort) as error:
        return _fail(error, "interrupted", 130, False)
    except (MemoryError, RuntimeError) as error:
        if not _out_of_memory(error):
            raise
        return _fail(
            error, "out of memory: try engine.lanes=1, a smaller batch_size or encoder", 1, "--debug" in arguments
        )
    except OSError as error:
        where = f" ({error.filename})" if error.filename else ""
        return _fail(error, f"{error.strerror or error}{where}", 1, "--debug" in arguments)
    return int(code or 0)


def _prepare_output() -> None:
    """Our log on stderr, ours alone; and a terminal that lacks a letter shows a question mark instead of failing."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    handler = logging.StreamHandler()
    handler.setFormatter(_Lines())
    log = logging.getLogger("fedu2")
    log.handlers = [handler]
    log.setLevel(logging.INFO)


class _Lines(logging.Formatter):
    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 (logging's name)
        return f"fedu2: {shown(record.message)}"


def _followed() -> bool:
    """Under torchrun only the first process is a command; the others train for it, and end with it."""
    if os.environ.get("WORLD_SIZE", "1") == "1":
        return False  # without importing torch
    from fedu2.run import follow

    return follow()


def _share_busy_cores() -> None:
    """Where cores are busy, let waiting threads sleep; must come before torch is imported.

    They spin by default: a third faster on idle cores, but on busy ones they starve each other (five times slower).
    The numbers that come out are the same.
    """
    if os.getloadavg()[0] > 0.75 * (os.cpu_count() or 1):
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def _out_of_memory(error: Exception) -> bool:
    """PyTorch reports it as a RuntimeError, on the CPU by its text alone."""
    words = ("out of memory", "can't allocate memory", "not enough memory")
    return isinstance(error, MemoryError) or any(word in str(error).lower() for word in words)


def _once(message: str) -> str:
    """A message without the hint that two libraries add to it in the same words."""
    hint = message.rpartition(" Did you mean ")
    return hint[0] if hint[0].endswith(hint[2]) else message


def _fail(error: BaseException, sentence: str, code: int, debug: bool) -> int:
    if debug:
        traceback.print_exception(error)
    print(f"fedu2: {shown(sentence)}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
