"""What can go wrong, in the user's words.

Every error that a user can cause or cure is a `FedU2Error` with one clear sentence; the command line prints
that sentence and exits with `exit_code`. Anything else is a bug and keeps its traceback.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = [
    "DataError",
    "FedU2Error",
    "Interrupted",
    "OutOfTime",
    "TrainingError",
    "UsageError",
    "did_you_mean",
    "first_line",
]


class FedU2Error(Exception):
    """Base of all errors that are told to the user in one sentence."""

    exit_code = 1


class UsageError(FedU2Error):
    """The request itself is wrong: an unknown key, a bad value, options that contradict each other."""

    exit_code = 2


class DataError(FedU2Error):
    """Images, archives or partitions are missing, damaged or too few."""


class TrainingError(FedU2Error):
    """Training cannot go on: a non-finite loss, a damaged or foreign checkpoint."""


class Interrupted(FedU2Error):  # noqa: N818 (nothing went wrong)
    """The user stopped a run."""

    exit_code = 130


class OutOfTime(FedU2Error):  # noqa: N818 (nothing went wrong)
    """A time limit came before the end; the same command with --resume goes on."""

    exit_code = 75


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A phrase such as `; did you mean 'byol'?`, or an empty string when nothing is near."""
    nearest = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f"; did you mean {nearest[0]!r}?" if nearest else ""


def first_line(error: BaseException) -> str:
    """What another library's error says, short enough for a sentence of ours; its type if it says nothing."""
    return next(iter(str(error).splitlines()), "") or type(error).__name__
