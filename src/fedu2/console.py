"""What the command line shows: live progress while training, and the table at the end."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from fedu2.experiment import Experiment
from fedu2.federation.backend import EpochReport
from fedu2.federation.callbacks import Callback
from fedu2.methods import Task

__all__ = ["Progress", "result_table", "round_line", "span"]


class Progress(Callback):
    """Live lines on a terminal, and one line a round that stays; elsewhere only the latter."""

    def __init__(self, console: Console, title: str = "") -> None:
        self.console = console
        self.title = title
        self.directory: Path | None = None  # of the run that has begun
        self._live: Live | None = None
        self._clock = _Clock()
        self._experiment = Experiment()
        self._tasks: Sequence[Task] = ()

    def on_start(self, experiment: Experiment, directory: Path, round_: int) -> None:
        self._experiment, self.directory = experiment, directory
        self._clock = _Clock(rounds=experiment.rounds - round_)
        length = f"{experiment.rounds} round{'s' if experiment.rounds > 1 else ''}"
        how = f"resuming after round {round_} of {experiment.rounds}" if round_ else length
        title = self.title or f"{experiment.method} with {experiment.objective}"
        self.console.print(f"[bold]{title}[/bold] · {experiment.dataset}, {experiment.encoder}, {how} → ", end="")
        self.console.print(str(directory), highlight=False, markup=False, soft_wrap=True)
        if self.console.is_terminal:
            self._live = Live(console=self.console, refresh_per_second=4, transient=True)
            self._live.start()

    def on_tasks(self, tasks: Sequence[Task]) -> None:
        self._tasks = tasks
        self._clock.rounds += tasks[0].round == 0  # a prelude comes on top
        self._clock.begin_round(sum(task.steps for task in tasks))

    def on_epoch(self, report: EpochReport) -> None:
        self._clock.advance(report)
        if self._live is not None:
            self._live.update(self._lines(report))

    def on_round(self, record: Mapping[str, Any]) -> None:
        style = "bold yellow" if record.get("collapse") else None
        self.console.print(round_line(record, self._experiment.rounds), highlight=False, markup=False, style=style)

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()

    def _lines(self, report: EpochReport) -> Group:
        place = next(i for i, task in enumerate(self._tasks) if task.client == report.task.client) + 1
        where = (
            f"round {report.task.round}/{self._experiment.rounds}  client {place}/{len(self._tasks)}  "
            f"{self._clock.speed():.0f} samples/s  {span(self._clock.left())} left"
        )
        bar = Table.grid(padding=(0, 1))
        bar.add_row(ProgressBar(total=1.0, completed=self._clock.share(), width=24), Text(where, no_wrap=True))
        terms = "  ".join(f"{name} {value:.3f}" for name, value in report.terms.items() if name != "fur.gap")
        return Group(bar, Text(terms, style="dim", no_wrap=True, overflow="ellipsis"))


class _Clock:
    """How far a run is and how long it will take, judged by steps and samples so far."""

    def __init__(self, rounds: int = 1) -> None:
        self.rounds = max(rounds, 1)
        self.began = time.perf_counter()
        self.training = 0.0
        self.samples = 0
        self.rounds_begun = 0
        self.steps_planned = 0
        self.steps_done = 0
        self._client_steps: dict[tuple[int, int], int] = {}
        self._last = self.began

    def begin_round(self, steps: int) -> None:
        self.rounds_begun += 1
        self._client_steps.clear()  # of the round before: it would grow for as long as the run lasts
        self.steps_planned += steps
        self._last = time.perf_counter()

    def advance(self, report: EpochReport) -> None:
        now = time.perf_counter()
        self.training += now - self._last
        self._last = now
        self.samples += report.samples
        key = (report.task.round, report.task.client)
        self.steps_done += report.steps - self._client_steps.get(key, 0)
        self._client_steps[key] = report.steps

    def share(self) -> float:
        """The part of all steps that is done; rounds to come are taken to be like those so far."""
        total = self.steps_planned * self.rounds / max(self.rounds_begun, 1)
        return self.steps_done / total if total else 0.0

    def speed(self) -> float:
        return self.samples / self.training if self.training else 0.0

    def left(self) -> float:
        share = self.share()
        return (time.perf_counter() - self.began) * (1 / share - 1) if share else 0.0


def span(seconds: float) -> str:
    """Such as 2:05 or 1:02:05."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"


def round_line(record: Mapping[str, Any], rounds: int) -> str:
    """What a round came to, in a line of plain text: logs show it, too."""
    parts = [f"round {record['round']:>{len(str(rounds))}}/{rounds}"]
    formats = {
        "loss": "loss {:.3f}",
        "fur.mass": "FUR mass {:.2f}",
        "knn": "kNN {:.1f} %",
        "effective_rank": "rank {:.1f}",
        "samples_per_second": "{:.0f} samples/s",
    }
    parts += [form.format(record[name]) for name, form in formats.items() if name in record]
    if record.get("collapse"):
        parts.append(f"too low: {', '.join(record['collapse'])}")
    return "  ".join(parts) + ("  (untrained)" if record["round"] == 0 else "")


def result_table(title: str, summary: Mapping[str, Any], compared: Mapping[str, Any] | None, path: Path) -> Table:
    """The table at the end of `fedu2 train`."""
    table = Table(title=title, show_header=False, title_justify="left", title_style="bold")
    table.add_column(style="cyan")
    table.add_column(overflow="fold")
    if "knn" in summary:
        if "untrained_knn" in summary:
            table.add_row("kNN, untrained encoder", f"{summary['untrained_knn']:.1f} %")
        if compared is not None:
            table.add_row("kNN, FedAvg at equal cost", f"{compared['knn']:.1f} %")
        table.add_row("kNN, trained encoder", f"[bold green]{summary['knn']:.1f} %[/bold green]")
    if "effective_rank" in summary:
        table.add_row("effective rank", _rank(summary))
    if "fur.mass" in summary:
        table.add_row("matched FUR mass", f"{summary['fur.mass']:.3f}")
    for name, sign in summary.get("collapse", {}).items():
        told = f"{name} was {sign['value']:.3g} in round {sign['round']}, too low in {sign['rounds']} in all"
        table.add_row("warning", f"[bold yellow]{told}[/bold yellow]")
    if "seconds" in summary:
        speed = f"{summary['samples_per_second']:.0f} samples/s"
        table.add_row("training time", f"{span(summary['seconds'])} ({speed})")
    table.add_row("written to", Text(str(path), overflow="fold"))
    return table


def _rank(summary: Mapping[str, Any]) -> str:
    before = f"{summary['untrained_effective_rank']:.1f} → " if "untrained_effective_rank" in summary else ""
    return f"{before}{summary['effective_rank']:.1f}"
