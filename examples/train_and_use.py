"""Train an encoder over five clients, then use it: python examples/train_and_use.py [RUN] [KEY=VALUE ...]"""

from __future__ import annotations

import sys

import torch
import torch.nn.functional as F

import fedu2
from fedu2.data import load_dataset
from fedu2.views import plain_view


def main(out: str | None = None, *settings: str) -> None:
    """One run on the embedded sample, and the nearest neighbours of a few test images."""
    experiment = fedu2.Experiment.parse({"method": "fedu2", "objective": "byol"}, settings)
    run = fedu2.train(experiment, out)
    print(f"kNN {run.summary['untrained_knn']:.1f} % untrained, {run.summary['knn']:.1f} % trained: {run.path}")

    dataset = load_dataset(experiment.dataset, experiment.data)
    encoder = run.encoder()
    with torch.no_grad():
        bank = F.normalize(encoder(plain_view(dataset.train.images[:1000])), dim=1)  # (1000, D)
        queries = F.normalize(encoder(plain_view(dataset.test.images[:5])), dim=1)  # (5, D)
    nearest = (queries @ bank.T).argmax(dim=1)
    assert dataset.train.labels is not None and dataset.test.labels is not None  # noqa: PT018
    for query, neighbour in enumerate(nearest.tolist()):
        ours, theirs = int(dataset.test.labels[query]), int(dataset.train.labels[neighbour])
        print(f"{dataset.classes[ours]:>10}: nearest training image: {dataset.classes[theirs]}")


if __name__ == "__main__":
    main(*sys.argv[1:])
