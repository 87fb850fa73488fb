"""The rotation task: turns, loss, and an option of every method."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import fedu2
from fedu2.experiment import Experiment
from fedu2.methods import Batch, build, resolve
from fedu2.models.flat import FlatModel
from fedu2.regularizers.rotation import rotation_loss, turned


@pytest.mark.parametrize("channels_last", [False, True])
def test_each_image_is_turned_by_its_own_angle(channels_last: bool) -> None:
    x = torch.randn(8, 3, 6, 6, generator=torch.Generator().manual_seed(0))
    order = torch.channels_last if channels_last else torch.contiguous_format
    x = x.contiguous(memory_format=order)
    turns = torch.tensor([0, 1, 2, 3, 3, 2, 1, 0])
    y = turned(x, turns)
    for image, turn, result in zip(x, turns.tolist(), y, strict=True):
        assert torch.equal(result, torch.rot90(image, turn, (1, 2)))
    assert y.is_contiguous(memory_format=order)


def test_the_loss_is_the_cross_entropy_of_the_angles(micro: Experiment) -> None:
    experiment = resolve(Experiment.parse(micro.flat(), ["method=fedsimclr", "rotation.weight=0.5"]))
    method = build(experiment)
    learner = method.learner().eval()
    views = torch.randn(2, 6, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    turns = torch.randint(4, (6,), generator=torch.Generator().manual_seed(3))
    logits = [
        learner.rotation(learner.projector(learner.encoder(torch.rot90(image, turn, (1, 2))[None])))[0]
        for image, turn in zip(views[0], turns.tolist(), strict=True)
    ]
    expected = F.cross_entropy(torch.stack(logits), turns)
    assert torch.allclose(rotation_loss(learner, views[0], torch.Generator().manual_seed(3)), expected, atol=1e-5)
    total, terms = method.loss(learner, Batch(views[0], views[1]), torch.Generator().manual_seed(3))
    assert torch.allclose(terms["rotation"], expected, atol=1e-5)
    assert torch.allclose(total, terms["align"] + 0.5 * expected, atol=1e-5)


def test_the_head_travels_and_stands_before_what_stays(micro: Experiment) -> None:
    experiment = resolve(Experiment.parse(micro.flat(), ["method=fedbyol", "rotation.weight=1"]))
    method = build(experiment)
    names = [entry.name for entry in method.layouts[0].entries]
    assert "rotation.weight" in names
    assert not any(name.startswith("target") for name in names)
    model = FlatModel(method.learner())
    assert model.layout.span("rotation").stop <= model.layout.span("target").start


def test_it_learns(micro: Experiment, tmp_path: Path) -> None:
    settings = ["method=fedsimclr", "rotation.weight=1", "rounds=6", "local_steps=15", "data.image_size=32", "width=8"]
    run = fedu2.train(Experiment.parse(micro.flat(), settings), tmp_path / "run")
    losses = [record["rotation"] for record in run.history[1:]]
    assert losses[0] > 1.3  # log 4 = 1.386
    assert losses[-1] < losses[0] - 0.05


def test_without_it_nothing_changes(micro: Experiment) -> None:
    plain = build(resolve(Experiment.parse(micro.flat(), ["method=fedbyol"])))
    turned_off = build(resolve(Experiment.parse(micro.flat(), ["method=fedbyol", "rotation.weight=0"])))
    assert plain.layouts == turned_off.layouts
    assert plain.experiment.rotation.weight == 0
    assert not any(name.startswith("rotation") for name, _ in plain.learner().named_parameters())
