"""From a valid input to one that is not quite: bytes at random, and JSON with something else in a place."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from typing import Any

__all__ = ["Mutate", "mutate_bytes", "mutate_json", "mutate_text", "spoil"]

Mutate = Callable[[bytes, Sequence[bytes], random.Random], bytes]
"""An input, all seeds, chance → another input."""

LONGEST = 1 << 16  # bytes of an input that still counts as small
INTERESTING = (0, 1, 0x7F, 0x80, 0xFF)
TOKENS = tuple(
    token.encode()
    for token in (
        "null", "true", "NaN", "-Infinity", "1e999", "-1", "0", "18446744073709551616", "9" * 4400, "0x" + "f" * 4000,
        '"', "'", "[", "]", "{", "}", ":", ",", "\n", "\t", " ", "&a", "*a", "<<: *a",
        "!!python/object/apply:os.system",
        "!!binary", "!!timestamp", "!!set", "1:59:59", "2001-02-30", ".inf", "\x00", "\ud7ff", "../../../etc/passwd",
        "/dev/zero", "a" * 300, "[" * 3000, "{a: " * 500, "\r\n", "%YAML 9.9", "---", "...", "\ufeff", "=", ".", "-",
    )
)  # fmt: skip
STRANGE: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2**31, 2**63, -(2**64), 10**400, 0.5, float("nan"), float("inf"), -float("inf"), "",
    "a", "0", "1", "../../x", "/dev/zero", "\x00", "\ud800", "a" * 300, [], [0], [[]], {}, {"": ""}, {"round": 1},
)  # fmt: skip


def mutate_bytes(data: bytes, seeds: Sequence[bytes], chance: random.Random) -> bytes:
    """One to eight small accidents."""
    for _ in range(1 << chance.randrange(4)):
        data = chance.choice(_ACCIDENTS)(data, seeds, chance)[:LONGEST]
    return data


def mutate_json(data: bytes, seeds: Sequence[bytes], chance: random.Random) -> bytes:
    """Half the time another value somewhere in the structure, else accidents."""
    if chance.random() < 0.5:
        return mutate_text(data, seeds, chance)
    try:
        content = json.loads(data)
    except ValueError:
        return mutate_text(data, seeds, chance)
    for _ in range(1 << chance.randrange(3)):
        content = spoil(content, chance)
    return json.dumps(content).encode()[:LONGEST]


def mutate_text(data: bytes, seeds: Sequence[bytes], chance: random.Random) -> bytes:
    """Accidents, of which most put in a word that means something."""
    for _ in range(1 << chance.randrange(4)):
        accident = chance.choice((_insert_token, _insert_token, *_ACCIDENTS))
        data = accident(data, seeds, chance)[:LONGEST]
    return data


def spoil(content: Any, chance: random.Random) -> Any:
    """The structure with one value replaced, dropped, nested, or moved."""
    inner = list(content) if isinstance(content, dict) else range(len(content)) if isinstance(content, list) else []
    if not inner or chance.random() < 0.15:
        deep: Any = chance.choice(STRANGE)
        for _ in range(chance.choice((0, 0, 0, 1, 5, 200))):
            deep = [deep]
        return deep
    key = chance.choice(list(inner))
    changed = dict(content) if isinstance(content, dict) else list(content)
    if chance.random() < 0.1:
        del changed[key]
    elif chance.random() < 0.1 and isinstance(changed, dict):
        changed[chance.choice(("", "a", ".", "a.b", str(key) + ".a"))] = changed.pop(key)
    else:
        changed[key] = spoil(changed[key], chance)
    return changed


def _at(data: bytes, chance: random.Random) -> int:
    return chance.randrange(len(data) + 1)


def _flip(data: bytes, seeds: Sequence[bytes], chance: random.Random) -> bytes:
    at = _at(data, chance)
    return data[:at] + bytes([data[at] ^ 1 << chance.randrange(8)]) + data[at + 1 :] if at < len(data) else data


def _set(data: bytes, seeds: Sequence[bytes], chance: random.Random) -> bytes:
    at, width = _at(data, chance), chance.choice((1, 1, 2, 4, 8))
    return data[:at] + bytes([chance.choice(INTERESTING)]) * width + data[at + width :]


def _cut(data: bytes, seeds: Sequence[bytes], chance: random.Random) -> bytes:
    at = _at(data, chance)
    return data[:at] + data[at + chance.choice((1, 2, 8, 64, len(data))) :]


def _repeat(data: bytes, seeds: Sequence[bytes], chance: random.Random) -> bytes:
    at, width = _at(data, chance), chance.choice((1, 4, 16, 256, 512))
    return data[:at] + data[at : at + width] * chance.choice((2, 3, 100)) + data[at + width :]


def _splice(data: bytes, seeds: Sequence[bytes], chance: random.Random) -> bytes:
    other = chance.choice(seeds)
    return data[: _at(data, chance)] + other[_at(other, chance) :]


def _insert_token(data: bytes, seeds: Sequence[bytes], chance: random.Random) -> bytes:
    at, token = _at(data, chance), chance.choice(TOKENS)
    return data[:at] + token + data[at + (len(token) if chance.random() < 0.5 else 0) :]


_ACCIDENTS: tuple[Mutate, ...] = (_flip, _flip, _set, _set, _cut, _repeat, _splice, _insert_token)
