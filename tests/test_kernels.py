"""The switch for hand-written kernels, and the reason why they cannot be used."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch

from fedu2 import kernels
from fedu2.kernels import fused, ready, why_not

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


def test_an_error_puts_the_switch_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "why_not", lambda device: None)
    with pytest.raises(ZeroDivisionError), fused(False):
        1 // ready(CPU)
    assert ready(CPU)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A machine on which fused kernels can be used, as far as `why_not` can see."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr("shutil.which", lambda name: "/usr/bin/gcc")
    monkeypatch.setattr("pathlib.Path.exists", lambda path: True)
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setitem(sys.modules, "triton", SimpleNamespace(__version__="3.10.0+git1"))
    monkeypatch.setitem(sys.modules, "some_kernel", SimpleNamespace())
    monkeypatch.setattr(kernels, "MODULES", {"some": "some_kernel"})
    return monkeypatch


def reason() -> str | None:
    return why_not.__wrapped__(GPU)


def test_nothing_is_missing(machine: pytest.MonkeyPatch) -> None:
    assert reason() is None


def test_an_old_gpu(machine: pytest.MonkeyPatch) -> None:
    machine.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert reason() == "the GPU is older than compute capability 8.0"


def test_no_triton(machine: pytest.MonkeyPatch) -> None:
    machine.setitem(sys.modules, "triton", None)  # makes the import fail
    assert reason() == "Triton is not installed"


def test_an_old_triton(machine: pytest.MonkeyPatch) -> None:
    machine.setitem(sys.modules, "triton", SimpleNamespace(__version__="3.1.0"))
    assert reason() == "Triton 3.1.0 is older than 3.2"


def test_no_compiler(machine: pytest.MonkeyPatch) -> None:
    machine.setattr("shutil.which", lambda name: None)
    assert reason() == "Triton finds no C compiler"


class Broken:
    """A finder of modules, for `sys.meta_path`: one of them raises an error."""

    def __init__(self, name: str, error: Exception) -> None:
        self.name, self.error = name, error

    def find_spec(self, name: str, path: object, target: object = None) -> None:
        if name == self.name:
            raise self.error


@pytest.mark.parametrize("broken", ["triton", "some_kernel"])
@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ImportError("libtriton.so: undefined symbol\nand much more"), "libtriton.so: undefined symbol"),
        (
            ModuleNotFoundError("No module named 'triton.nvidia'", name="triton.nvidia"),
            "No module named 'triton.nvidia'",
        ),
        (OSError(), "OSError"),
    ],
)
def test_a_broken_triton_is_not_a_missing_one(
    machine: pytest.MonkeyPatch, broken: str, error: Exception, line: str
) -> None:
    machine.delitem(sys.modules, broken)
    machine.setattr(sys, "meta_path", [Broken(broken, error), *sys.meta_path])
    assert reason() == line


def test_where_triton_works_all_kernels_are_found(needs_kernels: None) -> None:
    assert kernels.broken_module() is None
    for name, module in kernels.MODULES.items():
        assert kernels.load(name) is sys.modules[module]
