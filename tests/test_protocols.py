"""The linear probe and fine-tuning against other implementations."""

from __future__ import annotations

import copy
import logging

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedu2.data import ImageSet
from fedu2.engine import Engine
from fedu2.errors import DataError, TrainingError
from fedu2.evaluation.finetune import _Network, _Trainer, finetune, labelled_subset, tell_of_few_labels
from fedu2.evaluation.linear import Labelled, linear_probe
from fedu2.evaluation.options import FinetuneOptions, LinearOptions
from fedu2.models import build_encoder

CPU = Engine(torch.device("cpu"))


def _clouds(n: int, seed: int, spread: float = 1.2) -> Labelled:
    """Overlapping Gaussian clouds of five classes in twelve dimensions."""
    noise = torch.Generator().manual_seed(seed)
    centres = torch.randn(5, 12, generator=torch.Generator().manual_seed(99))
    labels = torch.arange(n) % 5
    return Labelled(centres[labels] + spread * torch.randn(n, 12, generator=noise), labels)


def test_the_probe_is_logistic_regression() -> None:
    from sklearn.linear_model import LogisticRegression

    train, test = _clouds(2000, 1), _clouds(2000, 2)
    reference = LogisticRegression(C=1e6, max_iter=5000).fit(train.features.numpy(), train.labels.numpy())
    expected = 100 * reference.score(test.features.numpy(), test.labels.numpy())
    found = linear_probe(train, test, 5, LinearOptions(epochs=60), [0, 1])
    assert 60 < expected < 95  # neither trivial nor hopeless
    assert found == pytest.approx([expected, expected], abs=1.0)


def _probe_by_loop(train: Labelled, test: Labelled, start: Tensor, orders: list[Tensor], lr: float, size: int) -> float:
    layer = nn.Linear(train.features.shape[1], start.shape[1])
    with torch.no_grad():
        layer.weight.copy_(start[:-1].T)
        layer.bias.copy_(start[-1])
    optimizer = torch.optim.Adam(layer.parameters(), lr=lr)
    for order in orders:
        for batch in order.split(size):
            optimizer.zero_grad()
            F.cross_entropy(layer(train.features[batch]), train.labels[batch]).backward()
            optimizer.step()
    return 100 * float((layer(test.features).argmax(1) == test.labels).float().mean())


def test_seeds_side_by_side_are_seeds_one_by_one() -> None:
    """The same start, the same batches (the last one smaller), the same Adam."""
    from fedu2.seeds import generator

    train, test, options = _clouds(230, 3), _clouds(500, 4), LinearOptions(epochs=3, batch_size=64)
    found = linear_probe(train, test, 5, options, [7, 8])
    for seed, accuracy in zip((7, 8), found, strict=True):
        noise = generator("cpu", seed, "linear probe")
        start = (2 * torch.rand(13, 5, generator=noise) - 1) / 12**0.5
        orders = [torch.randperm(230, generator=noise) for _ in range(3)]
        assert accuracy == pytest.approx(_probe_by_loop(train, test, start, orders, 3e-3, 64), abs=0.21)
    assert found == linear_probe(train, test, 5, options, [7, 8])


def test_labels_are_drawn_by_class_and_shares_are_nested() -> None:
    labels = torch.cat([torch.zeros(1000), torch.ones(300), torch.full((3,), 2)]).long()
    one, ten = labelled_subset(labels, 0.01, seed=0), labelled_subset(labels, 0.1, seed=0)
    assert labels[one].bincount().tolist() == [10, 3, 1]  # at least one of each class
    assert labels[ten].bincount().tolist() == [100, 30, 1]
    assert set(one.tolist()) <= set(ten.tolist())
    assert not torch.equal(one, labelled_subset(labels, 0.01, seed=1))
    assert torch.equal(one, labelled_subset(labels, 0.01, seed=0))


def test_fewer_labels_than_classes_are_told(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "fedu2"):
        tell_of_few_labels(torch.arange(50) % 10, [0.2])
        assert not caplog.records
        tell_of_few_labels(torch.arange(50) % 10, [0.01])
        tell_of_few_labels(torch.cat([torch.zeros(900), torch.arange(1, 10).repeat(5)]).long(), [0.02])
    assert caplog.messages == [
        "1 % of 50 images is less than one of each class (of 10): 10 are labelled",
        "2 % of 945 images is less than one of each class (of 9): 27 are labelled",
    ]


def test_training_that_diverges_is_no_score() -> None:
    options = FinetuneOptions(epochs=2, batch_size=16, classifier_lr=1e30)
    with pytest.raises(TrainingError, match="fine-tuning diverged"):
        finetune(build_encoder("tiny", 4), _stripes(40, 0), _stripes(40, 1), 2, options, CPU, seed=0)


def _stripes(n: int, seed: int) -> ImageSet:
    """Two classes that a network can tell apart: horizontal and vertical stripes, under noise."""
    noise = torch.Generator().manual_seed(seed)
    labels = torch.arange(n) % 2
    wave = (torch.arange(16) // 2 % 2).float()
    images = torch.where(labels[:, None, None].bool(), wave[:, None], wave[None, :])[:, None].expand(n, 3, 16, 16)
    images = 90 + 70 * images + 25 * torch.randn(n, 3, 16, 16, generator=noise)
    return ImageSet(images.clamp(0, 255).to(torch.uint8), labels)


def test_fine_tuning_learns_and_leaves_the_encoder_alone() -> None:
    torch.manual_seed(0)
    encoder = build_encoder("tiny", 4)
    before = copy.deepcopy(encoder.state_dict())
    options = FinetuneOptions(epochs=8, batch_size=16, encoder_lr=0.02)
    accuracy = finetune(encoder, _stripes(70, 0), _stripes(200, 1), 2, options, CPU, seed=0)
    assert accuracy > 90
    assert accuracy == finetune(encoder, _stripes(70, 0), _stripes(200, 1), 2, options, CPU, seed=0)
    assert all(torch.equal(tensor, before[name]) for name, tensor in encoder.state_dict().items())


def test_a_step_of_fine_tuning_against_plain_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two learning rates, momentum and weight decay; every batch of an epoch, the last one smaller."""
    from fedu2.views import RECIPES, Recipe, plain_view

    monkeypatch.setitem(RECIPES, "weak", (Recipe(), Recipe()))
    torch.manual_seed(0)
    network = _Network(build_encoder("tiny", 4), 2)
    reference = copy.deepcopy(network)
    data, options = _stripes(20, 0), FinetuneOptions(batch_size=8, weight_decay=0.01)
    trainer = _Trainer(network, data, options, CPU, seed=3, encoder_lr=0.05)
    seen: list[Tensor] = []
    load = trainer._load
    monkeypatch.setattr(trainer, "_load", lambda batches: (seen.extend(batches), load(batches)))
    trainer.train(2)

    optimizer = torch.optim.SGD(
        [
            {"params": reference.encoder.parameters(), "lr": 0.05},
            {"params": reference.classifier.parameters(), "lr": 0.3},
        ],
        momentum=0.9,
        weight_decay=0.01,
    )
    assert [len(batch) for batch in seen] == [8, 8, 4, 8, 8, 4]
    for batch in seen:
        optimizer.zero_grad()
        logits = reference.train()(plain_view(data.images[batch]).contiguous(memory_format=torch.channels_last))
        F.cross_entropy(logits, data.labels[batch]).backward()
        optimizer.step()
    for (name, mine), theirs in zip(network.named_parameters(), reference.parameters(), strict=True):
        assert torch.allclose(mine, theirs, atol=2e-4), name


def test_what_fine_tuning_needs() -> None:
    encoder = build_encoder("tiny", 4)
    images = _stripes(4, 0)
    with pytest.raises(DataError, match="needs labels"):
        finetune(encoder, ImageSet(images.images, None), images, 2, FinetuneOptions(epochs=1), CPU, seed=0)
    with pytest.raises(DataError, match="at least two labelled images"):
        finetune(encoder, images.subset(torch.tensor([0])), images, 2, FinetuneOptions(epochs=1), CPU, seed=0)
