"""Methods by name: one short file each, composed of objectives, regularisers and aggregators."""

from fedu2.methods import (  # noqa: F401 (the files register their methods)
    alignuniform,
    feddecorr,
    fedema,
    fedu,
    fedu2,
    fedx,
    ldawa,
    orchestra,
    plain,
    ssd,
)
from fedu2.methods.base import Batch, Learner, Memory, Method, Regularizer, Reply, ServerState, Task
from fedu2.methods.cards import (
    MethodCard,
    build,
    left_out,
    method,
    methods,
    plain_fedavg,
    resolve,
    stays_for,
    title_of,
)

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
    "left_out",
    "method",
    "methods",
    "plain_fedavg",
    "resolve",
    "stays_for",
    "title_of",
]

methods.seal()
