"""Shared by all tests."""

from __future__ import annotations

import functools
import importlib.util
import os
import signal
import threading
from collections.abc import Iterator
from dataclasses import replace

os.environ.setdefault("OMP_NUM_THREADS", "1")  # tests run in parallel; before torch is imported

import hypothesis
import pytest
import torch

from fedu2.data import ImageSet, base, embedded
from fedu2.experiment import Experiment
from fedu2.kernels import INTERPRETED

torch.set_num_threads(1)
hypothesis.settings.register_profile("untimed", deadline=None)  # machines are busy: no test asserts speed
hypothesis.settings.load_profile("untimed")
if threading.current_thread() is threading.main_thread():
    # A shell that starts us in the background has us ignore Ctrl-C, and the programs that tests start would, too.
    signal.signal(signal.SIGINT, signal.default_int_handler)

DEVICE = torch.device("cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu")


@pytest.fixture(scope="session", autouse=True)
def _sample_is_read_once() -> Iterator[None]:
    """Decoded and made smaller once: nearly every test loads it, and sites do for every message. Each gets a copy."""
    sheet, resized = functools.cache(embedded._read_sheet), base._resized
    kept = functools.cache(resized)

    def copied(images: ImageSet, size: int) -> ImageSet:
        if images not in (sheet("train"), sheet("test")):
            return resized(images, size)
        own = kept(images, size)
        return replace(own, images=own.images.clone(), labels=own.labels.clone())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(embedded, "_read_sheet", sheet)
        patch.setattr(base, "_resized", copied)
        yield


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
    items.sort(key=lambda item: "slow" not in item.keywords)  # they begin first: begun last, they would run alone


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
