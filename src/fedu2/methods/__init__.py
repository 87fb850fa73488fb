"""Methods by name: one short file each, composed of objectives, regularisers and aggregators."""

from fedu2.methods import fedu2 as _fedu2  # the files register their methods
from fedu2.methods import plain as _plain
from fedu2.methods.base import (
    Memory,
    Method,
    MethodCard,
    Regularizer,
    Reply,
    ServerState,
    build,
    method,
    methods,
    resolve,
    stays_for,
)

__all__ = [
    "Memory",
    "Method",
    "MethodCard",
    "Regularizer",
    "Reply",
    "ServerState",
    "build",
    "method",
    "methods",
    "resolve",
    "stays_for",
]

del _fedu2, _plain
