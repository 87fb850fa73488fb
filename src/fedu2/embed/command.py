"""`fedu2 embed`, apart from parsing."""

from __future__ import annotations

import time
from datetime import timedelta
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TimeRemainingColumn
from rich.text import Text

from fedu2.embed.pipeline import embed
from fedu2.errors import Interrupted
from fedu2.run import Run

__all__ = ["embed_images"]

PAUSE = 10.0  # seconds between the lines that are written where there is no terminal


def embed_images(console: Console, path: Path, images: str, out: Path, **options: Any) -> None:
    """Embed with progress, and say at the end what came out."""
    with _Progress(console) as progress:
        try:
            embedding = embed(Run(path), images, out, watch=progress.watch, **options)
        except KeyboardInterrupt:
            raise Interrupted("interrupted; the same command goes on where it stopped") from None
    count, dimension = embedding.vectors.shape
    skipped = f", {len(embedding.skipped)} skipped" if embedding.skipped else ""
    what = f"{count:,} vector{'s' if count != 1 else ''} of {dimension} numbers{skipped}"
    encoder = f"{embedding.about['encoder']} after round {embedding.about['round']}"
    console.print(f"{what}, by {encoder} ({progress.speed()}) → {out}", highlight=False, markup=False, soft_wrap=True)


class _Progress:
    """A bar on a terminal; elsewhere a line now and then."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.bar = Progress(
            BarColumn(), MofNCompleteColumn(), _Speed(), TimeRemainingColumn(compact=True),
            console=console, transient=True, disable=not console.is_terminal,
        )  # fmt: skip
        self.task = self.bar.add_task("", total=None)
        self.began: float | None = None
        self.before = self.done = 0

    def __enter__(self) -> _Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.stop()

    def watch(self, done: int, total: int) -> None:
        now = time.perf_counter()
        if self.began is None:
            self.began = self.spoken = now
            self.before = done
            self.bar.start()
            if done:
                self.console.print(f"going on: {done:,} of {total:,} images are done", highlight=False)
        self.done, self.last = done, now
        self.bar.update(self.task, completed=done, total=total)
        if not self.console.is_terminal and now - self.spoken > PAUSE:
            self.spoken = now
            self.console.print(
                f"{done:,} of {total:,} images, {self.speed()}, {self._left(total)} left", highlight=False
            )

    def speed(self) -> str:
        """Of what was done here, not before an interruption."""
        seconds = self.last - (self.began or 0.0)
        return f"{(self.done - self.before) / seconds:.0f} images/s" if seconds else "nothing left to do"

    def _left(self, total: int) -> timedelta:
        seconds = (self.last - (self.began or 0.0)) * (total - self.done) / max(1, self.done - self.before)
        return timedelta(seconds=round(seconds))


class _Speed(ProgressColumn):
    def render(self, task: Task) -> Text:
        return Text(f"{task.speed:.0f} images/s" if task.speed else "")
