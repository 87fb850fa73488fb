"""What the commands do, apart from parsing."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from fedu2.console import Progress, result_table
from fedu2.data import cache_directory
from fedu2.data import datasets as known_datasets
from fedu2.errors import Interrupted, OutOfTime, UsageError
from fedu2.experiment import SAMPLE_DEFAULTS, Experiment
from fedu2.federation.deadline import Deadline
from fedu2.methods import MethodCard, plain_fedavg, resolve, title_of
from fedu2.methods import methods as known_methods
from fedu2.methods.cards import has_target
from fedu2.parsing import choices, fields, leaves
from fedu2.resuming import open_ended
from fedu2.run import Run, train
from fedu2.rundir import RunDirectory, refuse_link

__all__ = ["examine", "experiment_from", "judge_run", "list_datasets", "list_keys", "list_methods", "run_training"]


def run_training(
    console: Console,
    settings: Sequence[str],
    config: Path | None,
    out: Path | None,
    resume: bool,
    compare: bool,
    report: bool,
    time_limit: float | None,
) -> None:
    """`fedu2 train`."""
    if resume and out is None:
        out = RunDirectory.newest()
    experiment = experiment_from(settings, config, out if resume else None)
    if compare and plain_fedavg(experiment) is None:
        what = f"{title_of(experiment)}, aggregator={experiment.aggregator}"
        raise UsageError(f"--compare has nothing to compare {what} with: it is plain FedAvg, or there is none for it")
    deadline, progress = Deadline(time_limit), Progress(console, title_of(experiment))
    go_on = f"continue with: fedu2 train --resume {'--compare ' if compare else ''}--out"
    try:
        run = train(experiment, out, resume=resume, callbacks=[progress], time_limit=time_limit)
        compared = _fedavg(console, run, deadline) if compare and run.finished else None
    except KeyboardInterrupt:
        begun = progress.directory or (out if resume else None)
        raise Interrupted(f"interrupted; {go_on} {begun}" if begun else "interrupted") from None
    for part in filter(None, (run, compared)):
        if not part.finished:
            played = f"round {part.rounds_played} of {part.experiment.rounds}"
            raise OutOfTime(f"the time limit came after {played}; {go_on} {run.path}")
    console.print()
    plain = compared.summary if compared else _earlier_comparison(run)
    console.print(result_table(title_of(experiment), run.summary, plain, run.path))
    if report:
        _report(console, run)
    _next_steps(console, run, plain is not None, report)


def experiment_from(settings: Sequence[str], config: Path | None, resumed: Path | None = None) -> Experiment:
    """From a file, or from the run that goes on, or from the defaults; settings are laid over it."""
    if config is None and resumed is not None and RunDirectory(resumed).begun():
        kept = RunDirectory(resumed).config(tell=False)  # `train` reads it again
        return resolve(Experiment.parse(kept.flat(), settings))
    return resolve(Experiment.load(config, settings) if config else Experiment.parse({}, settings))


def _fedavg(console: Console, run: Run, deadline: Deadline) -> Run:
    """The same training by plain FedAvg, written inside the run; goes on where it was interrupted."""
    plain = plain_fedavg(run.experiment)
    assert plain is not None, "asked for before the training"
    inside = run.path / "fedavg"
    refuse_link(inside)
    begun = RunDirectory(inside).begun()
    limit = None if deadline.seconds is None else deadline.left
    return train(plain, inside, resume=begun, callbacks=[Progress(console, "FedAvg, for comparison")], time_limit=limit)


def _earlier_comparison(run: Run) -> dict[str, Any] | None:
    """The summary of a comparison of the same length that was made before."""
    path = run.path / "fedavg" / "summary.json"
    summary = Run(path.parent).summary if path.exists() else None
    return summary if summary and summary["rounds"] == run.summary["rounds"] else None


def _report(console: Console, run: Run) -> None:
    from fedu2.report.page import write_report

    console.print("Drawing the report page; representations take one more round of local training ...")
    page = write_report([run.path])
    console.print(f"The report page: {page.resolve().as_uri()}\n", highlight=False, markup=False, soft_wrap=True)


def _next_steps(console: Console, run: Run, compared: bool, reported: bool) -> None:
    """Commands that work when they are typed as printed."""
    program, experiment, path = _program(), run.experiment, shlex.quote(str(run.path))
    unlike_fedavg = plain_fedavg(experiment) is not None
    go_on = f"{program} train --resume --out {path}"
    commands = [
        *([f"{go_on} --compare  # against plain FedAvg, at equal cost"] if unlike_fedavg and not compared else []),
        *([f"{go_on} rounds={2 * experiment.rounds}  # train on"] if open_ended(experiment) else []),
        *([] if reported else [f"{program} report {path}  # curves, figures and tables on one page"]),
        *([f"{program} evaluate {path}  # linear probe, fine-tuning with few labels"] if "knn" in run.summary else []),
        f"{program} export {path}  # the encoder, for use without fedu2",
    ]
    console.print("What to type next:")
    for command in commands:
        console.print(f"  {command}", highlight=False, markup=False, soft_wrap=True)


def _program() -> str:
    """How this program was called: by its name where that is found, else by its path."""
    called = Path(sys.argv[0])
    found = shutil.which("fedu2")
    if called.name != "fedu2" or (found and Path(found).resolve() == called.resolve()):
        return "fedu2"
    return os.path.relpath(called) if called.is_relative_to(Path.cwd()) or not called.is_absolute() else str(called)


def list_keys(console: Console) -> None:
    """`fedu2 train --keys`."""
    sample = dict(leaves(SAMPLE_DEFAULTS))
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for column in ("key", "default", "on the sample"):
        table.add_column(column, no_wrap=True)
    table.add_column("meaning")
    for key, field in fields(Experiment):
        words = choices(Experiment, key)
        meaning = [field.description or "", f"({' | '.join(words)})" if words else ""]
        special = _shown(sample[key]) if key in sample else ""
        table.add_row(key, _shown(field.default), special, " ".join(filter(None, meaning)))
    console.print(table)


def _shown(default: Any) -> str:
    return "–" if default is None else str(default).lower() if isinstance(default, bool) else str(default)


def examine(console: Console, settings: Sequence[str]) -> None:
    """`fedu2 doctor`."""
    from fedu2 import doctor

    experiment = resolve(Experiment.parse({}, settings))
    engine, findings = doctor.findings(experiment)
    console.print(doctor.versions(), highlight=False, style="dim")
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for column in ("", "uses", "because"):
        table.add_column(column, overflow="fold")
    for finding in findings:
        table.add_row(finding.what, finding.uses, finding.why)
    console.print(table)
    used, milliseconds = doctor.try_out(experiment, engine)
    what = f"{title_of(experiment)}, {experiment.encoder}, batches of {experiment.batch_size}"
    console.print(f"A trial on noise ({what}): {milliseconds:.3g} ms a step, with {used.summary()}.", highlight=False)


def judge_run(
    console: Console,
    path: Path,
    settings: Sequence[str],
    names: Sequence[str] | None,
    seeds: int,
    untrained: bool,
    best: bool,
    data: Path | None,
    holdout: float | None,
    device: str,
) -> None:
    """`fedu2 evaluate`."""
    from fedu2.evaluate import ALL, FILE, assess, parse_protocols

    if not RunDirectory(path).begun():
        raise UsageError(f"{path} holds no run")
    options, run = parse_protocols(settings), Run(path)
    choices: dict[str, Any] = {"seeds": seeds, "untrained": untrained, "best": best, "data": data, "holdout": holdout}
    verdict = assess(run, names or ALL, options, **choices, device=device)
    chosen = ", the best by kNN" if best else ""
    encoder = "untrained encoder" if untrained else f"encoder after round {verdict.round}{chosen}"
    images = f"{verdict.data} ({verdict.trained_on} images, {verdict.tested_on} to test)"
    title = f"{title_of(run.experiment)}: {encoder} on {images}"
    console.print(title, style="bold", highlight=False, markup=False, soft_wrap=True)
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("protocol")
    table.add_column("accuracy", justify="right")
    table.add_column("seeds", justify="right")
    for name, score in verdict.scores.items():
        spread = f" ± {score.deviation:.1f}" if len(score.values) > 1 else ""
        table.add_row(name, f"{score.mean:.1f}{spread} %", str(len(score.values)))
    console.print(table)
    console.print(f"Kept in {path / FILE}.", highlight=False, soft_wrap=True)


def list_methods(console: Console) -> None:
    """`fedu2 methods`."""
    for name in known_methods:
        card = known_methods[name]
        target = f" · target network {card.target}{_only(card)}" if _with_target(card) else ""
        console.print(f"[bold]{name}[/bold]  {card.title}: {card.summary}", highlight=False)
        for line in (
            f"objective {', '.join(card.objectives)} · aggregator {card.aggregator}{target}",
            f"sends {_sends(card)} · a client remembers {_remembers(card)}",
        ):
            console.print(f"    {line}", highlight=False)
        console.print(f"    {card.reference}\n", style="dim", highlight=False)


def _with_target(card: MethodCard) -> list[str]:
    """The objectives of a method that have a target network."""
    return [name for name in card.objectives if has_target(name)]


def _only(card: MethodCard) -> str:
    some = _with_target(card)
    return "" if len(some) == len(card.objectives) else f" (with {', '.join(some)})"


def _sends(card: MethodCard) -> str:
    target = f"target network{_only(card)}" if _with_target(card) and card.target == "shared" else ""
    return ", ".join(filter(None, ("encoder", "heads", target, card.sends)))


def _remembers(card: MethodCard) -> str:
    target = f"its target network{_only(card)}" if _with_target(card) and card.target == "local" else ""
    return ", ".join(filter(None, (target, card.remembers))) or "nothing"


def list_datasets(console: Console) -> None:
    """`fedu2 datasets`."""
    for name in known_datasets:
        summary = (known_datasets[name].__doc__ or "").strip().partition("\n")[0]
        console.print(f"[bold]{name}[/bold]  {summary}", highlight=False)
    console.print(f"Looked for under data.root, and under {cache_directory()}.", highlight=False, soft_wrap=True)
