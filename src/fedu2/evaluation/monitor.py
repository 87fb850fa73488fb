"""What is measured of the global encoder while training."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fedu2.data import Dataset
from fedu2.errors import TrainingError
from fedu2.evaluation.collapse import alignment, effective_rank, spread, uniformity
from fedu2.evaluation.knn import knn_accuracy
from fedu2.experiment import Experiment
from fedu2.objectives import Objective
from fedu2.seeds import generator
from fedu2.views import plain_view, two_views, views_for

__all__ = ["evaluate", "extract", "finite"]

PROBES = 2048  # images on which rank, alignment and uniformity are measured


@torch.no_grad()
def extract(module: nn.Module, images: Tensor, batch_size: int = 512) -> Tensor:
    """Features (N, D) of uint8 images (N, 3, S, S), with batch norm in evaluation mode."""
    training = module.training
    module.eval()
    features = torch.cat([module(plain_view(part)).float() for part in images.split(batch_size)])
    module.train(training)
    return features


@torch.no_grad()
def evaluate(learner: Objective, dataset: Dataset, experiment: Experiment) -> dict[str, float]:
    """kNN accuracy (where there are labels), rank and spread of features and projections, alignment, uniformity."""
    options = experiment.evaluation
    test = dataset.test
    held_out = test if len(test) > 1 else dataset.train  # rank and uniformity need more than one image
    features = finite(extract(learner.encoder, held_out.images, options.batch_size))
    measured: dict[str, float] = {}
    if dataset.train.labels is not None and test.labels is not None and len(test) > 0:
        queries = features if held_out is test else extract(learner.encoder, test.images, options.batch_size)
        bank = finite(extract(learner.encoder, dataset.train.images, options.batch_size))
        measured["knn"] = knn_accuracy(queries, test.labels, bank, dataset.train.labels, options.k, options.temperature)

    probes = held_out.images[:PROBES]
    recipes = views_for(experiment.views, experiment.objective or "byol")
    noise = generator(probes.device, experiment.seed, "evaluation")
    training = learner.training
    learner.eval()
    pairs = [two_views(part, recipes, noise) for part in probes.split(options.batch_size)]
    first = torch.cat([learner.encoder(view1).float() for view1, _ in pairs])
    second = torch.cat([learner.encoder(view2).float() for _, view2 in pairs])
    projections = finite(learner.projector(features[:PROBES]).float())
    learner.train(training)
    measured["effective_rank"] = effective_rank(features[:PROBES])
    measured["projector_rank"] = effective_rank(projections)
    measured["spread"] = spread(features[:PROBES])
    measured["projector_spread"] = spread(projections)
    measured["alignment"] = alignment(first, second)
    measured["uniformity"] = uniformity(features[:PROBES])
    return measured


def finite(features: Tensor) -> Tensor:
    """The features, which must be numbers."""
    if not bool(features.isfinite().all()):
        raise TrainingError(
            "the encoder gives features that are not finite: lower optimizer.lr or server.lr, and train anew"
        )
    return features
