"""What an encoder is worth downstream: the protocols by name, each over several seeds."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedu2.data import ImageSet
from fedu2.engine import Engine
from fedu2.errors import DataError
from fedu2.evaluation.finetune import finetune, labelled_subset
from fedu2.evaluation.knn import knn_accuracy
from fedu2.evaluation.linear import Labelled, linear_probe
from fedu2.evaluation.monitor import extract, finite
from fedu2.evaluation.options import Protocols
from fedu2.registry import Registry

__all__ = ["Candidate", "Protocol", "Score", "judge", "protocols"]


@dataclass(frozen=True)
class Score:
    """Test accuracies in percent, one a seed."""

    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        return statistics.fmean(self.values)

    @property
    def deviation(self) -> float:
        """Of a sample; 0 for a single value."""
        return statistics.stdev(self.values) if len(self.values) > 1 else 0.0


@dataclass(frozen=True, eq=False)
class Candidate:
    """An encoder before its judges, with labelled images on its device."""

    encoder: nn.Module
    untrained: Callable[[int], nn.Module]  # the same architecture, freshly initialised from a seed
    train: ImageSet
    test: ImageSet
    engine: Engine

    @property
    def classes(self) -> int:
        return int(torch.cat([_labels(self.train), _labels(self.test)]).max()) + 1

    def features(self) -> tuple[Labelled, Labelled]:
        """Of training and test images."""
        train, test = (Labelled(finite(extract(self.encoder, s.images)), _labels(s)) for s in (self.train, self.test))
        return train, test


Protocol = Callable[[Candidate, Protocols, Sequence[int]], Mapping[str, Score]]

protocols: Registry[Protocol] = Registry("protocol")


def judge(candidate: Candidate, names: Sequence[str], options: Protocols, seeds: Sequence[int]) -> dict[str, Score]:
    """The scores of all named protocols; fine-tuning has one for every share of labels."""
    if len(_labels(candidate.train).unique()) < 2:
        raise DataError("all training images are of one class: there is nothing to tell apart")
    scores: dict[str, Score] = {}
    for name in names:
        scores |= protocols[name](candidate, options, seeds)
    return scores


@protocols.register("knn")
def _knn(candidate: Candidate, options: Protocols, seeds: Sequence[int]) -> Mapping[str, Score]:
    """Nearest neighbours of frozen features; nothing is drawn, so there is one value."""
    train, test = candidate.features()
    chosen = options.knn
    found = knn_accuracy(test.features, test.labels, train.features, train.labels, chosen.k, chosen.temperature)
    return {"knn": Score((found,))}


@protocols.register("linear")
def _linear(candidate: Candidate, options: Protocols, seeds: Sequence[int]) -> Mapping[str, Score]:
    """A linear classifier on frozen features."""
    train, test = candidate.features()
    graph = candidate.engine.graph
    return {"linear": Score(tuple(linear_probe(train, test, candidate.classes, options.linear, seeds, graph=graph)))}


@protocols.register("finetune")
def _finetune(candidate: Candidate, options: Protocols, seeds: Sequence[int]) -> Mapping[str, Score]:
    """Encoder and classifier trained on a share of the labels; the seed draws the images, too."""
    return _with_few_labels("finetune", candidate, options, seeds, lambda seed: candidate.encoder, None)


@protocols.register("supervised")
def _supervised(candidate: Candidate, options: Protocols, seeds: Sequence[int]) -> Mapping[str, Score]:
    """The same labels without pre-training: what an untrained network makes of them."""
    rate = options.finetune.scratch_lr
    return _with_few_labels("supervised", candidate, options, seeds, candidate.untrained, rate)


def _with_few_labels(
    name: str,
    candidate: Candidate,
    options: Protocols,
    seeds: Sequence[int],
    encoder: Callable[[int], nn.Module],
    encoder_lr: float | None,
) -> dict[str, Score]:
    scores = {}
    labels, chosen = _labels(candidate.train), options.finetune
    for fraction in chosen.fractions:
        values = []
        for seed in seeds:
            few = candidate.train.subset(labelled_subset(labels, fraction, seed))
            network, judges = encoder(seed), (candidate.test, candidate.classes, chosen, candidate.engine, seed)
            values.append(finetune(network, few, *judges, encoder_lr))
        scores[f"{name} {100 * fraction:g} %"] = Score(tuple(values))
    return scores


def _labels(images: ImageSet) -> Tensor:
    if len(images) == 0:
        raise DataError("no images are held out to judge by: there are too few, or the holdout is 0")
    if images.labels is None:
        raise DataError("these images have no labels, without which an encoder cannot be judged")
    return images.labels
