"""The command line of `fedu2 paper`: parses, calls the library, prints."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

__all__ = ["EXHIBITS", "app"]

# Known by name here, so that help needs no heavy import.
EXHIBITS = {
    "table1": "Table 1: linear probe and fine-tuning, ours beside the paper's.",
    "table2": "Table 2: nearest neighbours, ours beside the paper's.",
    "harder": "Clients of two classes and of one: nearest neighbours and linear probe.",
    "tuning": "What was tried for each method's own hyper-parameters, on validation images.",
    "sample": "Three methods on the embedded sample, to try it all on a CPU.",
}
SWEEPS = {
    "figure4": "Figure 4: accuracy against the weight of FUR.",
    "figure5a": "Figure 5: accuracy against local epochs.",
    "figure5b": "Figure 5: accuracy against the number of clients.",
    "rounds": "Accuracy against the number of rounds, each run with a schedule of its own.",
    "rates": "Accuracy against the learning rate of clients.",
}
PICTURES = {
    "figure1": ("spectrum", "Figure 1: singular values of representations, for four methods."),
    "figure2": ("sphere", "Figure 2: representations on the sphere, for four methods."),
    "figure3": ("tsne", "Figure 3: t-SNE of global and local representations, for four methods."),
}

Results = Annotated[Path, typer.Option(help="where records lie")]
Runs = Annotated[Path, typer.Option(help="where cells are trained")]
Debug = Annotated[bool, typer.Option("--debug", help="show tracebacks")]
Markdown = Annotated[bool, typer.Option("--markdown", help="as Markdown")]
Out = Annotated[Path, typer.Option(help="folder for the picture, PNG and SVG")]

RESULTS, RUNS = Path("results/paper"), Path("runs/paper")

app = typer.Typer(help="The paper's tables and figures: run their cells, and show what came of it.")


@app.command("list")
def list_(
    name: Annotated[str | None, typer.Argument(help="table or figure whose cells to list")] = None,
    results: Results = RESULTS,
    debug: Debug = False,
) -> None:
    """List tables and figures, or the cells of one, with their records."""
    from fedu2.paper.command import list_exhibits

    list_exhibits(Console(), name, results)


@app.command()
def run(
    name: Annotated[str, typer.Argument(help="table or figure; `fedu2 paper list` shows them")],
    settings: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="what changes no result, such as data.root=PATH or device=cuda"),
    ] = None,
    cells: Annotated[
        list[str] | None,
        typer.Option(help="cells by name, setting or row, with * for anything; may be repeated; default: all"),
    ] = None,
    seeds: Annotated[str, typer.Option(help="0, or 0,1,2, or 0-2")] = "0",
    protocol: Annotated[
        list[str] | None, typer.Option(help="knn, linear, finetune, supervised; may be repeated; default: the first 3")
    ] = None,
    protocol_seeds: Annotated[int, typer.Option(min=1, help="repetitions of each protocol")] = 3,
    time_limit: Annotated[float | None, typer.Option(min=0, help="stop in time; in seconds")] = None,
    results: Results = RESULTS,
    runs: Runs = RUNS,
    commit: Annotated[str | None, typer.Option(help="of the source; default: asked from git")] = None,
    debug: Debug = False,
) -> None:
    """Train and judge cells, and write their records; what is complete is left alone, what is not goes on."""
    from fedu2.paper.campaign import Campaign
    from fedu2.paper.command import parse_seeds, run_cells
    from fedu2.paper.records import commit as current_commit

    known = current_commit() if commit is None else commit
    protocols = tuple(protocol or ("knn", "linear", "finetune"))
    campaign = Campaign(runs, results, settings or [], protocols, protocol_seeds, known)
    run_cells(Console(), name, cells or [], parse_seeds(seeds), campaign, time_limit)


@app.command()
def page(
    results: Results = RESULTS,
    out: Annotated[Path | None, typer.Option(help="file to write; default: shown")] = None,
    debug: Debug = False,
) -> None:
    """All tables and sweeps as one Markdown page, from records."""
    from fedu2.paper.command import write_page

    write_page(Console(), results, out)


def _table(name: str) -> Callable[..., None]:
    def show(results: Results = RESULTS, markdown: Markdown = False, debug: Debug = False) -> None:
        from fedu2.paper.command import show_exhibit

        show_exhibit(Console(), name, results, markdown)

    return show


def _sweep(name: str) -> Callable[..., None]:
    def show(results: Results = RESULTS, markdown: Markdown = False, out: Out = Path(), debug: Debug = False) -> None:
        from fedu2.paper.command import draw_sweep, show_exhibit

        console = Console()
        show_exhibit(console, name, results, markdown)
        draw_sweep(console, name, results, out)

    return show


def _picture(name: str, figure: str) -> Callable[..., None]:
    def show(runs: Runs = RUNS, seed: int = 0, out: Out = Path(), debug: Debug = False) -> None:
        from fedu2.paper.command import draw_methods

        draw_methods(Console(), name, figure, runs, seed, out)

    return show


for _name, _help in EXHIBITS.items():
    app.command(_name, help=_help)(_table(_name))
for _name, _help in SWEEPS.items():
    app.command(_name, help=_help)(_sweep(_name))
for _name, (_figure, _help) in PICTURES.items():
    app.command(_name, help=_help)(_picture(_name, _figure))
