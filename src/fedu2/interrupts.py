"""Ctrl-C: several in quick succession are one, and what must not be cut in two is not."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = ["one_at_a_time", "uninterrupted"]

SAME = 1.0  # seconds within which another Ctrl-C is taken for the same


@contextmanager
def one_at_a_time(to_the_end: bool) -> Iterator[None]:
    """The first Ctrl-C ends what is done here in order; those that follow at once do not disturb that.

    to_the_end: the process ends after it, and is let.
    """
    if not _ours() or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield  # somebody has said what Ctrl-C does: of a job in the background, nothing
        return
    last = -SAME

    def heed(number: int, frame: FrameType | None) -> None:
        nonlocal last
        before, last = last, time.monotonic()
        if last - before >= SAME:
            raise KeyboardInterrupt

    signal.signal(signal.SIGINT, heed)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN if to_the_end else signal.default_int_handler)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """What is done here is done to its end: a Ctrl-C is heeded after it."""
    heed = signal.getsignal(signal.SIGINT)
    if not _ours() or not callable(heed):
        yield
        return
    came: list[tuple[int, FrameType | None]] = []
    signal.signal(signal.SIGINT, lambda number, frame: came.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, heed)
    for number, frame in came[:1]:
        heed(number, frame)


def _ours() -> bool:
    """Only the main thread may say what signals do."""
    return threading.current_thread() is threading.main_thread()
