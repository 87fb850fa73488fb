"""Parts by name: encoders, objectives, methods, aggregators and datasets are looked up here, never by if-chains."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from fedu2.errors import UsageError, did_you_mean

__all__ = ["Registry"]

T = TypeVar("T")


class Registry(Generic[T]):
    """A mapping from names to parts of one kind, with an error text that proposes the fix.

    >>> encoders: Registry[type] = Registry("encoder")
    >>> @encoders.register("tiny")
    ... class Tiny: ...
    >>> encoders["tiny"] is Tiny
    True
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._parts: dict[str, T] = {}
        self._sealed: frozenset[str] = frozenset()

    def register(self, name: str) -> Callable[[T], T]:
        """Decorator: make a part known as `name`. Yours may be redefined (in a notebook, say), built-in ones not."""

        def add(part: T) -> T:
            if name in self._sealed:
                raise ValueError(f"{self.kind} {name!r} is built in: choose another name")
            self._parts[name] = part
            return part

        return add

    def seal(self) -> None:
        """Called when the package has registered its own parts: their names are taken for good."""
        self._sealed = frozenset(self._parts)

    def __getitem__(self, name: str) -> T:
        if name not in self._parts:
            known = ", ".join(self)
            raise UsageError(f"unknown {self.kind} {name!r}: known are {known}{did_you_mean(name, self)}")
        return self._parts[name]

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._parts))

    def __contains__(self, name: object) -> bool:
        return name in self._parts
