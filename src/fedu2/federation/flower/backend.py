"""The server's end of the seam: tasks go out to the sites' nodes, and valid replies come in."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Iterator, Mapping, Sequence

from flwr.app import ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid

from fedu2.defence.bounds import claims, claims_limit
from fedu2.errors import DataError
from fedu2.experiment import Experiment
from fedu2.federation.backend import Absent, Observer
from fedu2.federation.flower.roster import Roster, SiteCard
from fedu2.federation.flower.wire import Assignment, pack_assignment, pack_server, told_experiment, unpack_reply
from fedu2.files import shown
from fedu2.methods import Memory, Reply, ServerState, Task

__all__ = ["FlowerBackend", "Roster", "SiteCard"]

log = logging.getLogger("fedu2")

PATIENCE = 120.0  # seconds for a site to describe itself
PAUSE = 0.2  # seconds between two looks for replies
AGAIN = 60.0  # seconds after which a node that was refused is asked again
MOST_IMAGES = 10**9
NUMBERED = re.compile(r"site-([0-9]{10,})")  # what a site without a name of its own is called, by its node's number
TROUBLES = ("images", "configuration", "training")  # the kinds of errors that a site tells
SLACK = 1e-3  # figures are rounded, and may lie a little beyond their ends
LONGEST = 200  # letters of a reason: a site may have chosen them


class FlowerBackend:
    """Runs tasks at the sites. run: the federation's name."""

    trusted = False  # sites answer what they like

    def __init__(self, grid: Grid, experiment: Experiment, run: str, roster: Roster) -> None:
        self.grid, self.experiment, self.name, self.roster = grid, experiment, run, roster
        self.half = experiment.flower.half  # parameters travel in bfloat16

    def refresh(self) -> None:
        """Ask nodes that are new who they are, and those that were refused a while ago."""
        nodes = set(self.grid.get_node_ids())
        self.roster.keep(nodes)
        now = time.monotonic()
        known = {card.node for card in self.roster.cards.values()}
        known |= {node for node, when in self.roster.refused.items() if now < when}
        ask = ConfigRecord({"experiment": told_experiment(self.experiment)})
        new = {node: RecordDict({"ask": ask}) for node in sorted(nodes - known)}
        cards: list[SiteCard] = []
        for node, answer in self._ask(new, "query.describe", PATIENCE):
            try:
                cards.append(_card(node, answer))
            except DataError as error:
                self._refuse(node, _said(error))
        for card in sorted(cards, key=lambda card: (card.name, card.node)):  # numbers do not depend on who is quicker
            if (owner := self.roster.owners.get(card.name, card.node)) != card.node:
                self._refuse(card.node, f"another node is site {card.name} already, node {owner}")
            else:
                self.roster.refused.pop(card.node, None)
                client = self.roster.admit(card)
                log.info("site %s is client %d, with %d images (node %d)", card.name, client, card.examples, card.node)

    def run(
        self, tasks: Sequence[Task], server: ServerState, memories: Mapping[int, Memory], observer: Observer
    ) -> Iterator[Reply | Absent]:
        """Send every task to its site; what does not come back in time, or is not valid, is told as absent."""
        assigned: dict[int, Assignment] = {}
        for task in tasks:
            card = self.roster.cards.get(task.client)
            if card is None:
                yield Absent(task.client, "it is not connected")
            else:
                assigned[card.node] = Assignment(self.name, task, server, self.experiment, self.half)
        arrays = pack_server(server, self.half) if assigned else None
        contents = {node: pack_assignment(assignment, arrays) for node, assignment in assigned.items()}
        del arrays
        for node, answer in self._ask(contents, "train.task", self.experiment.flower.timeout):
            client = assigned[node].task.client
            try:
                yield unpack_reply(_content(answer), assigned[node])
            except DataError as error:
                yield Absent(client, _said(error))

    def judge(self, server: ServerState, round_: int, features: int) -> dict[str, float]:
        """The sites' own figures of the global encoder, weighted by their held-out images; features: its dimension."""
        ranges = _ranges(features, self.experiment.heads.out or features)
        judges = [card for card in self.roster.cards.values() if card.judges]
        task = Task(round_, 0, 0, 0.0, 0.0)
        content = pack_assignment(Assignment(self.name, task, server, self.experiment, self.half))
        told: list[tuple[int, dict[str, float]]] = []
        for node, answer in self._ask({card.node: content for card in judges}, "query.judge", PATIENCE):
            try:
                told.append(_figures(answer, ranges))
            except DataError as error:
                log.warning("node %d judges nothing: %s", node, _said(error))
        if not told:
            return {}
        tested = [images for images, _ in told]
        limit = claims_limit(self.experiment.defence, self.trusted)
        for place, images in (claims(tested, limit) if limit else {}).items():
            tested[place] = images
        parts = list(zip(tested, (figures for _, figures in told), strict=True))
        return {name: sum(n * figures[name] for n, figures in parts) / sum(tested) for name in ranges}

    def _ask(
        self, contents: Mapping[int, RecordDict], kind: str, patience: float
    ) -> Iterator[tuple[int, Message | None]]:
        """Send each node its message; answers as they come, None for those that do not within `patience` seconds."""
        # What nobody waits for any more is not worked on, either: Flower drops it after its time.
        messages = [
            Message(content, dst_node_id=node, message_type=kind, ttl=patience) for node, content in contents.items()
        ]
        if not messages:
            return
        sent = dict(zip(self.grid.push_messages(messages), contents, strict=True))
        del messages
        until = time.monotonic() + patience
        while sent and time.monotonic() < until:
            for reply in self.grid.pull_messages(list(sent)):
                yield sent.pop(reply.metadata.reply_to_message_id), reply
            if sent:
                time.sleep(PAUSE)
        for node in sent.values():
            yield node, None

    def _refuse(self, node: int, reason: str) -> None:
        self.roster.refused[node] = time.monotonic() + AGAIN
        log.warning("node %d is left out: %s; it is asked again in %g seconds", node, reason, AGAIN)


def _card(node: int, answer: Message | None) -> SiteCard:
    content = _content(answer)
    try:
        told = content.config_records["site"]
        card = SiteCard(str(told["name"]), node, int(str(told["examples"])), bool(told["judges"]))
    except (KeyError, ValueError) as error:
        raise DataError(f"it does not say who it is: {error}") from None
    if not (0 < len(card.name) <= 64 and card.name.isprintable()):
        raise DataError("its name is longer than 64 characters, or cannot be printed")
    if (own := NUMBERED.fullmatch(card.name)) and int(own[1]) != node:
        raise DataError(f"{card.name} is the name of another node")
    if not 2 <= card.examples <= MOST_IMAGES:
        raise DataError(f"site {card.name} has {card.examples} images, and a client needs two")
    return card


def _ranges(features: int, projections: int) -> dict[str, tuple[float, float]]:
    """What a site with labels measures, and between which ends.

    Per cent; ranks, of no more than the dimension; ‖z − z'‖² of unit vectors; log E exp(−2‖z − z'‖²).
    """
    ranks = {"effective_rank": (0.0, float(features)), "projector_rank": (0.0, float(projections))}
    return {"knn": (0.0, 100.0), **ranks, "alignment": (0.0, 4.0), "uniformity": (-8.0, 0.0)}


def _figures(answer: Message | None, ranges: Mapping[str, tuple[float, float]]) -> tuple[int, dict[str, float]]:
    """How many held-out images a site has, and what it measured on them."""
    try:
        told = _content(answer).metric_records["metrics"]
        figures = {name: float(str(told[name])) for name in ranges}
        tested = int(str(told["tested"]))
    except (KeyError, ValueError) as error:
        raise DataError(f"it does not say what it measured: {error}") from None
    for name, (least, most) in ranges.items():
        if not least - SLACK <= figures[name] <= most + SLACK:  # nor is what is not a number
            raise DataError(f"what it measured cannot be: {name} is {figures[name]:g}")
    if not 1 <= tested <= MOST_IMAGES:
        raise DataError(f"what it measured cannot be: it is of {tested} images")
    return tested, figures


def _said(error: DataError) -> str:
    """Why, for a line of the log or a record. It may quote what a site sent, which is cut and commands no terminal."""
    text = str(error)
    return shown(text if len(text) <= LONGEST else f"{text[:LONGEST]} …")


def _content(answer: Message | None) -> RecordDict:
    """What a site answered; an error, or silence, is told as such."""
    if answer is None:
        raise DataError("it did not answer in time")
    if answer.has_error():
        raise DataError(
            f"it failed, and Flower's code for it is {answer.error.code}"
        )  # the text may name a site's files
    content = answer.content
    if "error" in content.config_records:
        about = str(content.config_records["error"].get("about"))
        raise DataError(f"it has trouble with its {about if about in TROUBLES else 'work'}; its own log says more")
    return content
