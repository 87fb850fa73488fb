"""Whether fused GPU kernels may be used: a switch, and the reason why not.

with fused(False):
    plan = transport.solve(...)  # the portable path, also on a GPU
"""

from __future__ import annotations

import os
import shutil
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from pathlib import Path

import torch

__all__ = ["LARGEST", "fits", "fused", "padded", "ready", "why_not"]

LARGEST, LONGEST = 32768, 1024  # entries and sides of a padded transport problem: it must fit on the chip
OLDEST_GPU, OLDEST_TRITON = (8, 0), (3, 2)

switch: ContextVar[bool] = ContextVar("fused kernels", default=True)


@contextmanager
def fused(enabled: bool) -> Iterator[None]:
    """Switch fused kernels on (the default) or off within the block."""
    before = switch.set(enabled)
    try:
        yield
    finally:
        switch.reset(before)


def ready(device: torch.device) -> bool:
    return switch.get() and why_not(device) is None


@cache
def why_not(device: torch.device) -> str | None:
    """One line on what keeps fused kernels from running on the device, None if nothing does."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return "no CUDA device"
    if torch.version.hip:
        return "not an NVIDIA GPU"
    if torch.cuda.get_device_capability(device) < OLDEST_GPU:
        return f"the GPU is older than compute capability {OLDEST_GPU[0]}.{OLDEST_GPU[1]}"
    return missing_compiler()


def missing_compiler() -> str | None:
    """What Triton lacks to compile a kernel and the stub that launches it."""
    try:
        import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
    except ImportError:
        return "Triton is not installed"
    if tuple(int(part) for part in triton.__version__.split(".")[:2]) < OLDEST_TRITON:
        return f"Triton {triton.__version__} is older than {OLDEST_TRITON[0]}.{OLDEST_TRITON[1]}"
    if not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):
        return "Triton finds no C compiler"
    if not (Path(sysconfig.get_paths()["include"]) / "Python.h").exists():
        return "Triton finds no Python headers (Python.h)"
    return None


def padded(size: int) -> int:
    """The next power of two."""
    return 1 << (size - 1).bit_length()


def fits(rows: int, columns: int) -> bool:
    """Whether one program can hold a transport problem of that size."""
    return padded(rows) * padded(columns) <= LARGEST and max(rows, columns) <= LONGEST
