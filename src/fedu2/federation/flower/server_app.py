"""What Flower starts at the server: an experiment from the run's configuration, and a run directory."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from typing import Any

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from fedu2.console import round_line
from fedu2.errors import FedU2Error, UsageError
from fedu2.federation.callbacks import Callback
from fedu2.federation.flower.init import experiment_of
from fedu2.federation.flower.server import serve

__all__ = ["STOPPED", "app"]

STOPPED = "stopped: "  # before the reason

log = logging.getLogger("fedu2")
app = ServerApp()


class _Lines(Callback):
    """A line a round in the server's log, which `flwr log` shows."""

    def __init__(self, rounds: int) -> None:
        self.rounds = rounds

    def on_round(self, record: Mapping[str, Any]) -> None:
        log.info("%s", round_line(record, self.rounds))


@app.main()
def main(grid: Grid, context: Context) -> None:
    """`flwr run`: train, or go on with what is in `out`."""
    _speak()
    try:
        _serve(grid, dict(context.run_config))
    except FedU2Error as error:
        log.error("%s%s", STOPPED, error)  # Flower shows a traceback; this line says what it means
        raise


def _serve(grid: Grid, settings: dict[str, Any]) -> None:
    out = settings.pop("out", None)
    if not out:
        raise UsageError('the app\'s configuration says where the run goes: out = "/path"')
    experiment = experiment_of(settings)
    run = serve(grid, experiment, str(out), callbacks=[_Lines(experiment.rounds)])
    log.info("finished: %s", run.path)


def _speak() -> None:
    """Our log on standard output, which Flower keeps and `flwr log` shows."""
    log.setLevel(logging.INFO)
    if not log.handlers:
        handler = logging.StreamHandler(sys.stdout)
        handler.setFormatter(logging.Formatter("fedu2: %(message)s"))
        log.addHandler(handler)
