"""Who takes part: the sites by name, the client number of each, and the node that answers for it."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

__all__ = ["Roster", "SiteCard"]

PARTITION = re.compile(r"partition-([0-9]{1,6})")


@dataclass(frozen=True)
class SiteCard:
    """What a site told of itself."""

    name: str
    node: int
    examples: int
    judges: bool  # whether it has held-out images with labels


@dataclass
class Roster:
    """The sites by client number, which a name keeps for good; nodes may come, go, and come back.

    As long as this server runs, a name is its first node's, also while that is away: Flower knows nodes by their keys.
    Not for longer: their numbers last as long as the SuperLink's memory, and a server that is started anew may meet all
    of them under others.
    """

    numbers: dict[str, int] = field(default_factory=dict)
    cards: dict[int, SiteCard] = field(default_factory=dict)  # of those that are connected now
    owners: dict[str, int] = field(default_factory=dict)  # the node that a name belongs to
    refused: dict[int, float] = field(default_factory=dict)  # nodes that could not say who they are: when to ask again

    def admit(self, card: SiteCard) -> int:
        """The client number of a site, new or known."""
        number = self.numbers.get(card.name)
        if number is None:
            own, taken = PARTITION.fullmatch(card.name), set(self.numbers.values())
            wanted = range(int(own[1]), int(own[1]) + 1) if own else range(0)  # nobody's number is taken away
            number = next(n for n in (*wanted, *range(len(taken) + 1)) if n not in taken)
            self.numbers[card.name] = number
        others = {name: node for name, node in self.owners.items() if node != card.node}  # nobody hoards names
        self.owners = {**others, card.name: card.node}
        self.cards[number] = card
        return number

    def keep(self, nodes: set[int]) -> None:
        """Forget sites whose nodes are gone; their names stay theirs."""
        self.cards = {number: card for number, card in self.cards.items() if card.node in nodes}
        self.refused = {node: when for node, when in self.refused.items() if node in nodes}
