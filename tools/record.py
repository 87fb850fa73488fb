"""Write the record of a run, finished or not, as one small JSON file: python tools/record.py RUN OUT [COMMIT]."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import fedu2
from fedu2.engine import choose, choose_device
from fedu2.federation.play import summarise
from fedu2.run import environment


def main(run_path: str, out: str, commit: str = "") -> None:
    """Configuration, environment, commit and history, as the program wrote them."""
    run = fedu2.Run(Path(run_path))
    record = {
        "experiment": {key: value for key, value in run.experiment.flat().items() if key != "data.root"},
        "environment": environment(choose(run.experiment, choose_device(run.experiment.device))),
        "commit": commit,
        "summary": summarise(run.history),
        "history": run.history,
    }
    Path(out).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
