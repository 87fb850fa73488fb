"""The server's end of the seam: tasks go out to the sites' nodes, and valid replies come in."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from flwr.app import ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid

from fedu2.errors import DataError
from fedu2.experiment import Experiment
from fedu2.federation.backend import Absent, Observer
from fedu2.federation.flower.wire import Assignment, pack_assignment, unpack_reply
from fedu2.methods import Memory, Reply, ServerState, Task

__all__ = ["FlowerBackend", "Roster", "SiteCard"]

log = logging.getLogger("fedu2")

PATIENCE = 120.0  # seconds for a site to describe itself
PAUSE = 0.2  # seconds between two looks for replies
PARTITION = "partition-"


@dataclass(frozen=True)
class SiteCard:
    """What a site told of itself."""

    name: str
    node: int
    examples: int
    judges: bool  # whether it has held-out images with labels


@dataclass
class Roster:
    """The sites by client number, which a name keeps for good; nodes may come, go, and come back under another id."""

    numbers: dict[str, int] = field(default_factory=dict)
    cards: dict[int, SiteCard] = field(default_factory=dict)  # of those that are connected now
    refused: set[int] = field(default_factory=set)  # nodes that could not say who they are

    def admit(self, card: SiteCard) -> int:
        """The client number of a site, new or known."""
        number = self.numbers.get(card.name)
        if number is None:
            own = card.name.removeprefix(PARTITION)
            taken = set(self.numbers.values())
            free = next(n for n in range(len(taken) + 1) if n not in taken)
            number = int(own) if card.name.startswith(PARTITION) and own.isdigit() else free
            self.numbers[card.name] = number
        self.cards[number] = card
        return number

    def has(self, name: str) -> bool:
        """Whether a site of this name is connected."""
        return self.numbers.get(name) in self.cards

    def keep(self, nodes: set[int]) -> None:
        """Forget sites whose nodes are gone."""
        self.cards = {number: card for number, card in self.cards.items() if card.node in nodes}
        self.refused &= nodes


class FlowerBackend:
    """Runs tasks at the sites. run: the federation's name; half: parameters travel in bfloat16."""

    def __init__(self, grid: Grid, experiment: Experiment, run: str, roster: Roster) -> None:
        self.grid, self.experiment, self.name, self.roster = grid, experiment, run, roster

    def refresh(self) -> None:
        """Ask nodes that are new who they are."""
        nodes = set(self.grid.get_node_ids())
        self.roster.keep(nodes)
        known = {card.node for card in self.roster.cards.values()} | self.roster.refused
        ask = ConfigRecord({"experiment": json.dumps(self.experiment.flat())})
        new = {node: RecordDict({"ask": ask}) for node in sorted(nodes - known)}
        cards: list[SiteCard] = []
        for node, answer in self._ask(new, "query.describe", PATIENCE):
            try:
                cards.append(_card(node, answer))
            except DataError as error:
                self._refuse(node, str(error))
        for card in sorted(cards, key=lambda card: (card.name, card.node)):  # numbers do not depend on who is quicker
            if self.roster.has(card.name):
                self._refuse(card.node, f"another node is site {card.name} already")
            else:
                log.info("site %s is client %d, with %d images", card.name, self.roster.admit(card), card.examples)

    def run(
        self, tasks: Sequence[Task], server: ServerState, memories: Mapping[int, Memory], observer: Observer
    ) -> Iterator[Reply | Absent]:
        """Send every task to its site; what does not come back in time, or is not valid, is told as absent."""
        half = self.experiment.flower.half
        assigned: dict[int, Assignment] = {}
        for task in tasks:
            card = self.roster.cards.get(task.client)
            if card is None:
                yield Absent(task.client, "it is not connected")
            else:
                assigned[card.node] = Assignment(self.name, task, server, self.experiment, half)
        contents = {node: pack_assignment(assignment) for node, assignment in assigned.items()}
        for node, answer in self._ask(contents, "train.task", self.experiment.flower.timeout):
            client = assigned[node].task.client
            try:
                yield unpack_reply(_content(answer), assigned[node])
            except DataError as error:
                yield Absent(client, str(error))

    def judge(self, server: ServerState, round_: int) -> dict[str, float]:
        """The sites' own figures of the global encoder, weighted by their held-out images."""
        judges = [card for card in self.roster.cards.values() if card.judges]
        task = Task(round_, 0, 0, 0.0, 0.0)
        content = pack_assignment(Assignment(self.name, task, server, self.experiment, self.experiment.flower.half))
        sums: dict[str, float] = {}
        tested = 0.0
        for node, answer in self._ask({card.node: content for card in judges}, "query.judge", PATIENCE):
            try:
                told = {name: float(str(value)) for name, value in _content(answer).metric_records["metrics"].items()}
            except (DataError, KeyError, ValueError) as error:
                log.warning("node %d judges nothing: %s", node, error)
                continue
            weight = told.pop("tested")
            tested += weight
            for name, value in told.items():
                sums[name] = sums.get(name, 0.0) + weight * value
        return {name: value / tested for name, value in sums.items()} if tested else {}

    def _ask(
        self, contents: Mapping[int, RecordDict], kind: str, patience: float
    ) -> Iterator[tuple[int, Message | None]]:
        """Send each node its message; answers as they come, None for those that do not within `patience` seconds."""
        messages = [Message(content, dst_node_id=node, message_type=kind) for node, content in contents.items()]
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
        self.roster.refused.add(node)
        log.warning("node %d is left out: %s", node, reason)


def _card(node: int, answer: Message | None) -> SiteCard:
    content = _content(answer)
    try:
        told = content.config_records["site"]
        card = SiteCard(str(told["name"]), node, int(str(told["examples"])), bool(told["judges"]))
    except (KeyError, ValueError) as error:
        raise DataError(f"it does not say who it is: {error}") from None
    if card.examples < 2:
        raise DataError(f"site {card.name} has {card.examples} images, and a client needs two")
    return card


def _content(answer: Message | None) -> RecordDict:
    """What a site answered; an error, or silence, is told as such."""
    if answer is None:
        raise DataError("it did not answer in time")
    if answer.has_error():
        raise DataError(f"it failed: {answer.error.reason}")
    content = answer.content
    if "error" in content.config_records:
        about = str(content.config_records["error"].get("about"))
        raise DataError(f"it has trouble with {about}; its own log says more")
    return content
