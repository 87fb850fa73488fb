"""Records of the paper's cells; digests are made right, as somebody would who changes a figure by hand."""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory

from fedu2.evaluation.options import Protocols
from fedu2.files import digest_of
from fedu2.paper.page import emphasised, machines, minutes
from fedu2.paper.plan import exhibits
from fedu2.paper.records import path_of
from fedu2.paper.tables import markdown, readable, sheets
from fuzz.mutate import mutate_json as mutate

__all__ = ["mutate", "one_input", "seeds"]

CELL = exhibits["sample"].all_cells()[0]


def seeds() -> list[bytes]:
    """Of a run that is over, and of one that has begun."""
    experiment = CELL.experiment(0).flat()
    entry = {"protocol": "linear", "encoder": "last", "round": experiment["rounds"], "data": experiment["dataset"],
             "seeds": 3, "options": Protocols().model_dump(mode="json"), "values": [80.0], "seconds": 3.0}  # fmt: skip
    history = [{"round": 0, "knn": 30.0}, {"round": experiment["rounds"], "seconds": 4.0}]
    content = {"format": 1, "cell": CELL.name, "seed": 0, "commit": "", "environment": {}, "experiment": experiment,
               "summary": {}, "evaluation": [entry], "history": history}  # fmt: skip
    return [json.dumps(content).encode(), json.dumps({**content, "history": [], "evaluation": []}).encode()]


def one_input(data: bytes) -> None:
    """As tables find it: a record that is none is trouble to be told, and the others are shown."""
    try:
        content = json.loads(data)
        content["digest"] = digest_of(content)
        data = json.dumps(content).encode()
    except (ValueError, TypeError, RecursionError, AttributeError):
        pass  # as it is
    with TemporaryDirectory() as folder:
        path = path_of(CELL, 0, Path(folder))
        path.parent.mkdir(parents=True)
        path.write_bytes(data)
        found, _ = readable(CELL, Path(folder))
        sheet = sheets("sample", exhibits["sample"], Path(folder))[0]
    markdown(emphasised(sheet)), minutes(found), machines(found)
    for record in found:
        record.score("linear"), record.seconds(), record.progress
