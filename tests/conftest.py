"""Shared by all tests."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # tests run in parallel; before torch is imported

import pytest
import torch

from fedu2.experiment import Experiment

torch.set_num_threads(1)


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
