"""Hand-written GPU kernels: the switch that allows them, the way to them, and the reason why not.

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
from importlib import import_module
from pathlib import Path
from types import ModuleType

import torch

from fedu2.errors import first_line

__all__ = ["INTERPRETED", "fused", "load", "ready", "why_not"]

MODULES = {  # they need Triton
    "norm": "fedu2.models.norm_kernel",
    "sinkhorn": "fedu2.regularizers.sinkhorn_kernel",
    "stem": "fedu2.models.stem_kernel",
    "views": "fedu2.views.kernel",
}
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # kernels run on the CPU, slowly: for tests
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
def load(name: str) -> ModuleType | None:
    """A module of kernels, None where it cannot be imported; where a GPU could use it, `why_not` has the reason."""
    try:
        return import_module(MODULES[name])
    except ImportError:
        return None


@cache
def why_not(device: torch.device) -> str | None:
    """One line on what keeps fused kernels from running on the device, None if nothing does."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return "no CUDA device"
    if torch.version.hip:
        return "not an NVIDIA GPU"
    if torch.cuda.get_device_capability(device) < OLDEST_GPU:
        return f"the GPU is older than compute capability {OLDEST_GPU[0]}.{OLDEST_GPU[1]}"
    return missing_compiler() or broken_module()


def missing_compiler() -> str | None:
    """What Triton lacks to compile a kernel and the stub that launches it."""
    try:
        import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
    except Exception as error:
        absent = isinstance(error, ModuleNotFoundError) and error.name == "triton"
        return "Triton is not installed" if absent else first_line(error)
    if tuple(int(part) for part in triton.__version__.split(".")[:2]) < OLDEST_TRITON:
        return f"Triton {triton.__version__} is older than {OLDEST_TRITON[0]}.{OLDEST_TRITON[1]}"
    if not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):
        return "Triton finds no C compiler"
    if not (Path(sysconfig.get_paths()["include"]) / "Python.h").exists():
        return "Triton finds no Python headers (Python.h)"
    return None


def broken_module() -> str | None:
    """What the first module of kernels raises that cannot be imported: Triton may be installed and not work."""
    try:
        for module in MODULES.values():
            import_module(module)
    except Exception as error:
        return first_line(error)
    return None
