from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from fedu2.data import Dataset, ImageSet, load_dataset
from fedu2.errors import TrainingError
from fedu2.evaluation import alignment, effective_rank, knn_accuracy, knn_predict, spectrum, uniformity
from fedu2.evaluation.collapse import spread
from fedu2.evaluation.monitor import evaluate, extract
from fedu2.evaluation.sphere import on_sphere
from fedu2.experiment import Experiment
from fedu2.methods import build, resolve
from fedu2.views import plain_view


def _loop_knn(queries, bank, labels, classes, k, temperature):
    queries, bank = F.normalize(queries, dim=1), F.normalize(bank, dim=1)
    predictions = []
    for q in queries:
        similarity = [float(q @ b) for b in bank]
        nearest = sorted(range(len(bank)), key=lambda i: -similarity[i])[:k]
        votes = [0.0] * classes
        for i in nearest:
            votes[int(labels[i])] += math.exp(similarity[i] / temperature)
        predictions.append(votes.index(max(votes)))
    return torch.tensor(predictions)


@pytest.mark.parametrize(("k", "temperature"), [(1, 0.1), (5, 0.1), (7, 1.0), (500, 0.5)])
def test_knn_against_a_loop(k: int, temperature: float) -> None:
    torch.manual_seed(k)
    bank, labels, queries = torch.randn(60, 8), torch.randint(0, 4, (60,)), torch.randn(30, 8)
    expected = _loop_knn(queries, bank, labels, 4, k, temperature)
    assert torch.equal(knn_predict(queries, bank, labels, 4, k, temperature), expected)


def test_knn_chunks_do_not_matter_and_low_temperatures_do_not_overflow() -> None:
    torch.manual_seed(0)
    bank, labels = torch.randn(200_000, 4), torch.randint(0, 3, (200_000,))
    queries = torch.randn(100, 4)  # more than one chunk of 80
    whole = knn_predict(queries, bank, labels, 3, 10, 0.001)
    single = torch.cat([knn_predict(q[None], bank, labels, 3, 10, 0.001) for q in queries])
    assert torch.equal(whole, single)


def test_knn_accuracy_is_in_percent() -> None:
    bank = torch.eye(4)
    assert knn_accuracy(bank, torch.arange(4), bank, torch.arange(4), k=1) == 100
    assert knn_accuracy(bank, torch.tensor([0, 1, 0, 0]), bank, torch.arange(4), k=1) == 50


def test_effective_rank_of_known_spectra() -> None:
    torch.manual_seed(0)
    gaussian = torch.randn(4000, 16)
    assert effective_rank(gaussian) == pytest.approx(16, rel=0.02)
    assert effective_rank(torch.ones(50, 16)) == 1.0
    line = torch.randn(100, 1) * torch.ones(1, 16)  # after normalisation two opposite points
    assert effective_rank(line) == pytest.approx(1.0, abs=1e-6)
    uneven = torch.cat([torch.eye(2), -torch.eye(2), torch.eye(2)[:1], -torch.eye(2)[:1]])  # σ ∝ 2 and √2
    p = torch.tensor([2.0, math.sqrt(2)]) / (2 + math.sqrt(2))
    assert effective_rank(uneven) == pytest.approx(float((-p * p.log()).sum().exp()), abs=1e-6)
    basis = torch.cat([torch.eye(4), -torch.eye(4)])  # four equal singular values
    assert effective_rank(basis) == pytest.approx(4.0, abs=1e-9)
    assert torch.allclose(spectrum(basis), torch.full((4,), 0.25, dtype=torch.float64))


@pytest.mark.parametrize("scale", [2.0**100, 2.0**-100])
def test_figures_of_directions_do_not_depend_on_lengths(scale: float) -> None:
    """Squares of 10³⁰ are beyond float32; to the figures such features are as good as any others."""
    features = torch.randn(300, 16, generator=torch.Generator().manual_seed(0))
    labels = (features[:, 0] > 0).long()

    def figures(x: torch.Tensor) -> list[float]:
        knn = knn_accuracy(x[:100], labels[:100], x[100:], labels[100:], 20)
        return [knn, effective_rank(x), spread(x), alignment(x[:150], x[150:]), uniformity(x)]

    assert figures(scale * features) == figures(features)
    assert figures(features)[0] > 70
    assert torch.equal(on_sphere(features), F.normalize(features, dim=1))
    assert torch.equal(on_sphere(torch.zeros(2, 3)), torch.zeros(2, 3))


def test_alignment_and_uniformity_by_hand() -> None:
    z = torch.eye(2)
    assert alignment(z, z) == 0
    assert alignment(z, -3 * z) == pytest.approx(4.0)
    assert uniformity(torch.ones(5, 3)) == pytest.approx(0.0, abs=1e-5)
    assert uniformity(torch.tensor([[1.0, 0.0], [-2.0, 0.0]])) == pytest.approx(-8.0, abs=1e-4)  # ‖·‖² = 4, t = 2


def _small(micro: Experiment, test_images: int) -> tuple[Experiment, Dataset]:
    sample = load_dataset("sample", micro.data)
    train, test = sample.train.subset(torch.arange(120)), sample.test.subset(torch.arange(test_images))
    return resolve(micro), Dataset("small", train, test, sample.classes)


def test_evaluation_is_what_its_parts_say(micro: Experiment) -> None:
    experiment, dataset = _small(micro.with_(evaluation__k=5), 60)
    learner = build(experiment).learner()
    measured = evaluate(learner, dataset, experiment)
    learner.eval()
    with torch.no_grad():
        bank = learner.encoder(plain_view(dataset.train.images))
        queries = learner.encoder(plain_view(dataset.test.images))
    expected = knn_accuracy(queries, dataset.test.labels, bank, dataset.train.labels, k=5)
    assert measured["knn"] == pytest.approx(expected)
    assert measured["effective_rank"] == pytest.approx(effective_rank(queries), rel=1e-4)


def test_extraction_uses_running_statistics_and_restores_the_mode(micro: Experiment) -> None:
    experiment, dataset = _small(micro, 8)
    encoder = build(experiment).learner().encoder.train()
    together = extract(encoder, dataset.test.images)
    alone = torch.cat([extract(encoder, image[None]) for image in dataset.test.images])
    assert torch.allclose(together, alone, atol=1e-5)
    assert encoder.training


def test_a_single_test_image_is_judged_alone(micro: Experiment) -> None:
    experiment, dataset = _small(micro, 1)
    measured = evaluate(build(experiment).learner(), dataset, experiment)
    assert measured["knn"] in (0.0, 100.0)
    unlabelled = Dataset("bare", ImageSet(dataset.train.images, None), ImageSet(dataset.test.images[:0], None))
    assert "knn" not in evaluate(build(experiment).learner(), unlabelled, experiment)


def test_features_that_are_not_finite_are_named(micro: Experiment) -> None:
    experiment, dataset = _small(micro, 4)
    learner = build(experiment).learner()
    with torch.no_grad():
        learner.encoder.stem[0].weight.fill_(float("inf"))
    with pytest.raises(TrainingError, match="features that are not finite"):
        evaluate(learner, dataset, experiment)
