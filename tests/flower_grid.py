"""A grid in this process: nodes are contexts, messages are answered when they are pulled, and all of it is kept."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable
from typing import Any

from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.supercore.task_identity import TaskIdentity

Spoil = Callable[[int, Message, Message], Message | None]
"""node, question, answer → what arrives in its place; None for silence."""


class LocalGrid:
    """What `FlowerBackend` needs of a grid."""

    def __init__(self, app: ClientApp, nodes: dict[int, dict[str, Any]], spoil: Spoil | None = None) -> None:
        TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = 1  # as in a process that Flower started
        self.app, self.spoil = app, spoil
        self.contexts = {
            node: Context(run_id=1, node_id=node, node_config=config, state=RecordDict(), run_config={})
            for node, config in nodes.items()
        }
        self.connected = set(nodes)
        self.waiting: dict[str, Message] = {}
        self.seen: list[tuple[str, int, Message]] = []  # everything that travelled, in either direction

    def get_node_ids(self) -> list[int]:
        return sorted(self.connected)

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        ids = []
        for message in messages:
            message.metadata.__dict__["_message_id"] = uuid.uuid4().hex
            ids.append(message.metadata.message_id)
            self.waiting[ids[-1]] = message
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        replies = []
        for message in [self.waiting.pop(i) for i in message_ids if i in self.waiting]:
            node = message.metadata.dst_node_id
            self.seen.append(("down", node, message))
            try:
                reply: Message | None = self.app(message, self.contexts[node])
            except Exception as error:  # as a SuperNode does
                reply = Message(Error(code=0, reason=f"{type(error)}:<'{error}'>"), reply_to=message)
            assert reply is not None
            if self.spoil is not None:
                reply = self.spoil(node, message, reply)
            if reply is not None:
                self.seen.append(("up", node, reply))
                replies.append(reply)
        return replies
