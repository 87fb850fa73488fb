"""What Flower starts at a site for every message. Images, labels, paths and names of files stay here.

query.describe   how many images the site has, and whether it could judge an encoder
train.task       one client's work in one round
query.judge      kNN and the like of the global encoder on the site's own held-out images
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from fedu2.data import Dataset
from fedu2.engine import choose_device
from fedu2.errors import DataError, FedU2Error, UsageError
from fedu2.evaluation.monitor import evaluate
from fedu2.experiment import Experiment
from fedu2.federation.flower.site import DiskMemory, Memories, Site, site_of
from fedu2.federation.flower.wire import (
    pack_reply,
    pack_tensors,
    unpack_assignment,
    unpack_tensors,
)
from fedu2.methods import Memory, build
from fedu2.models.flat import FlatModel

__all__ = ["app"]

log = logging.getLogger("fedu2")
app = ClientApp()

MEMORY = "memory-"
LEAST_JUDGED = 10  # held-out images: figures of fewer tell of single ones


class ContextMemory:
    """Memories in Flower's context, which lasts as long as its run."""

    def __init__(self, context: Context) -> None:
        self.state = context.state

    def rounds(self) -> list[int]:
        return [int(name.removeprefix(MEMORY)) for name in self.state if name.startswith(MEMORY)]

    def read(self, round_: int) -> Memory:
        record = self.state[f"{MEMORY}{round_}"]
        assert isinstance(record, ArrayRecord)
        return unpack_tensors(record)

    def write(self, round_: int, memory: Memory) -> None:
        self.state[f"{MEMORY}{round_}"] = pack_tensors(memory)

    def forget(self, round_: int) -> None:
        del self.state[f"{MEMORY}{round_}"]


Answer = Callable[[Message, Context], RecordDict]


def _answered(answer: Answer) -> Callable[[Message, Context], Message]:
    """Send the answer; of what went wrong the server learns the kind, for a sentence may name the site's files."""

    def reply(message: Message, context: Context) -> Message:
        try:
            content = answer(message, context)
        except FedU2Error as error:
            log.error("%s", error)
            kinds = {DataError: "images", UsageError: "configuration"}
            content = _trouble(next((what for kind, what in kinds.items() if isinstance(error, kind)), "training"))
        except Exception:  # Flower would send its text
            log.exception("this went wrong, and nobody foresaw it")
            content = _trouble("training")
        return Message(content, reply_to=message)

    return reply


def _trouble(about: str) -> RecordDict:
    return RecordDict({"error": ConfigRecord({"about": about})})


@app.query("describe")
@_answered
def describe(message: Message, context: Context) -> RecordDict:
    asked = json.loads(str(message.content.config_records["ask"]["experiment"]))
    site, _ = _site(Experiment.parse(asked), context)
    told: dict[str, Any] = {"name": site.name, "examples": len(site.share), "judges": _judges(site, context)}
    return RecordDict({"site": ConfigRecord(told)})


@app.train("task")
@_answered
def train(message: Message, context: Context) -> RecordDict:
    began = time.perf_counter()
    asked = unpack_assignment(message.content)
    site, experiment = _site(asked.experiment, context)
    assignment = replace(asked, experiment=experiment)
    reply = site.work(assignment, _memories(context, asked.run, site))
    seconds = {"site_seconds": time.perf_counter() - began}  # what a round takes beyond them is on the way
    return pack_reply(replace(reply, metrics={**reply.metrics, **seconds}), asked)


@app.query("judge")
@_answered
def judge(message: Message, context: Context) -> RecordDict:
    asked = unpack_assignment(message.content)
    site, experiment = _site(asked.experiment, context)
    if not _judges(site, context):
        raise UsageError("this site does not judge encoders")
    device = choose_device(experiment.device)
    model = FlatModel(build(experiment).learner(), device)
    model.load(asked.server.model)
    own = site.train.subset(site.share)
    figures = evaluate(model.module, Dataset(site.name, own, site.test).to(device), experiment)
    return RecordDict({"metrics": MetricRecord({**figures, "tested": len(site.test)})})


def _site(wanted: Experiment, context: Context) -> tuple[Site, Experiment]:
    """The site, and the server's experiment on this machine's device."""
    node = dict(context.node_config)
    root = node.get("root") or context.run_config.get("data.root")  # of a data set that nodes take shares of
    here = wanted.with_(
        device=str(node.get("device", "auto")),
        data__root=str(root) if root else None,
        split__file=context.run_config.get("split.file"),
    )
    return site_of(here, {"site": f"site-{context.node_id}", **node}), here


def _judges(site: Site, context: Context) -> bool:
    """Whether it tells the server how good an encoder is on its images: it has labels, enough, and is willing."""
    labelled = site.test.labels is not None and site.train.labels is not None
    return labelled and len(site.test) >= LEAST_JUDGED and bool(context.node_config.get("judge", True))


def _memories(context: Context, run: str, site: Site) -> Memories:
    folder = context.node_config.get("memory")
    return DiskMemory(Path(str(folder)) / run / quote(site.name, safe="")) if folder else ContextMemory(context)
