"""Randomness as a function of where it is used.

Every random choice is drawn from a generator that is derived from the experiment's seed and a path such as
("views", round, client). Nothing carries generator state from one place to the next, so clients may run in any
order, on any backend, or after a resume, and still draw the same numbers.
"""

from __future__ import annotations

import hashlib

import torch

__all__ = ["derive", "generator"]


def derive(seed: int, *path: int | str) -> int:
    """A 63-bit seed for the use named by `path`, independent of the seeds of all other paths."""
    text = "/".join(str(part) for part in (seed, *path))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def generator(device: torch.device | str, seed: int, *path: int | str) -> torch.Generator:
    """A fresh generator on `device` for the use named by `path`."""
    return torch.Generator(device=device).manual_seed(derive(seed, *path))
