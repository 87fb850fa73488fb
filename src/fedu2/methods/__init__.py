"""Methods by name: one short file each, composed of objectives, regularisers and aggregators."""

from fedu2.methods import fedu2 as _fedu2  # the files register their methods
from fedu2.methods import plain as _plain
from fedu2.methods.base import Batch, Learner, Memory, Method, Regularizer, Reply, ServerState, Task
from fedu2.methods.cards import MethodCard, build, method, methods, resolve, stays_for

__all__ = [
    "Batch",
    "Learner",
    "Memory",
    "Method",
    "MethodCard",
    "Regularizer",
    "Reply",
    "ServerState",
    "Task",
    "build",
    "method",
    "methods",
    "resolve",
    "stays_for",
]

del _fedu2, _plain

methods.seal()
