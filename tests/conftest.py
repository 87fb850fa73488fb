"""Shared by all tests."""

from __future__ import annotations

import importlib.util
import os
import signal
import threading

os.environ.setdefault("OMP_NUM_THREADS", "1")  # tests run in parallel; before torch is imported

import pytest
import torch

from fedu2.experiment import Experiment
from fedu2.kernels import INTERPRETED

torch.set_num_threads(1)
if threading.current_thread() is threading.main_thread():
    # A shell that starts us in the background has us ignore Ctrl-C, and the programs that tests start would, too.
    signal.signal(signal.SIGINT, signal.default_int_handler)

DEVICE = torch.device("cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu")


@pytest.fixture
def needs_gpu() -> None:
    if DEVICE.type != "cuda":
        pytest.skip("needs a GPU")


@pytest.fixture
def needs_kernels() -> None:
    """Triton and a GPU, or Triton and its interpreter; a Triton that is there and broken is an error."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("needs Triton")
    if DEVICE.type != "cuda" and not INTERPRETED:
        pytest.skip("needs a GPU or TRITON_INTERPRET=1")


@pytest.hookimpl(tryfirst=True)  # before tests are selected by their markers
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """`make test-gpu` takes all that most machines skip."""
    for item in items:
        if {"needs_gpu", "needs_kernels"} & set(getattr(item, "fixturenames", ())):
            item.add_marker("gpu")


@pytest.fixture
def micro() -> Experiment:
    """The smallest experiment that exercises everything: three uneven clients, a minute encoder, two rounds."""
    return Experiment.parse(
        {
            "dataset": "sample",
            "data.image_size": 16,
            "clients": 3,
            "partition": "quantity",
            "alpha": 1.0,
            "split.min_size": 40,
            "encoder": "tiny",
            "width": 4,
            "rounds": 2,
            "local_steps": 3,
            "batch_size": 32,
            "evaluation.every": 0,
            "optimizer.lr": 0.05,
        }
    )
