"""Time limits: a run that must stop by a certain moment stops between two rounds."""

from __future__ import annotations

import time

__all__ = ["Deadline"]


class Deadline:
    """Whether there is time for one more lap, taken to last as long as the longest so far; the first always begins."""

    def __init__(self, seconds: float | None) -> None:
        self.seconds = seconds
        self.began = self._lap_began = time.monotonic()
        self.longest = 0.0

    @property
    def left(self) -> float:
        """Seconds; infinite without a limit."""
        return float("inf") if self.seconds is None else self.began + self.seconds - time.monotonic()

    def lap(self) -> None:
        """A lap is over."""
        now = time.monotonic()
        self.longest = max(self.longest, now - self._lap_began)
        self._lap_began = now

    def start(self) -> None:
        """Laps begin here; what came before counts against the limit only."""
        self._lap_began = time.monotonic()

    def reached(self) -> bool:
        """Whether the next lap would probably not fit."""
        return self.longest > 0 and self.left < self.longest
