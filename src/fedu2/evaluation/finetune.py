"""Fine-tuning: encoder and linear classifier trained on few labels; and the same from scratch, as a reference.

The paper's setting (from its authors' code): SGD with momentum 0.9, 1e-3 for the encoder and 0.3 for the classifier,
200 epochs, crops of 64 to 100 % of the area and flips; the labelled images are drawn by class. On a GPU the step is
captured and replayed, as in training.
"""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedu2.data import ImageSet
from fedu2.engine import Engine
from fedu2.errors import DataError, TrainingError
from fedu2.evaluation.options import FinetuneOptions
from fedu2.federation.capture import WARM_UP, CapturedSteps
from fedu2.federation.step import HalfWeights, backward
from fedu2.models.flat import FlatModel
from fedu2.models.norm import use_fused
from fedu2.seeds import derive, generator
from fedu2.views import RECIPES, plain_view, training_views

__all__ = ["finetune", "labelled_subset", "tell_of_few_labels"]

log = logging.getLogger("fedu2")


def labelled_subset(labels: Tensor, fraction: float, seed: int) -> Tensor:
    """Indices of a share of the images, drawn by class; of each class at least one.

    labels: (N,) int64. The same seed draws the same images, and a larger share contains a smaller one.
    """
    labels = labels.cpu()
    chosen: list[Tensor] = []
    for label in labels.unique().tolist():
        members = (labels == label).nonzero().squeeze(1)
        order = torch.randperm(len(members), generator=generator("cpu", seed, "labels", label))
        chosen.append(members[order[: max(1, round(fraction * len(members)))]])
    return torch.cat(chosen).sort().values


def tell_of_few_labels(labels: Tensor, fractions: Sequence[float]) -> None:
    """Log shares that are less than one image of some class, of which one is labelled all the same."""
    counts = labels.cpu().bincount()
    sizes = counts[counts > 0].tolist()
    for fraction in fractions:
        small = sum(round(fraction * size) == 0 for size in sizes)
        if small:
            labelled = sum(max(1, round(fraction * size)) for size in sizes)
            share = f"{100 * fraction:g} % of {len(labels)} images"
            log.warning("%s is less than one of each class (of %d): %d are labelled", share, small, labelled)


def finetune(
    encoder: nn.Module,
    train: ImageSet,
    test: ImageSet,
    classes: int,
    options: FinetuneOptions,
    engine: Engine,
    seed: int,
    encoder_lr: float | None = None,
) -> float:
    """Test accuracy in percent after training a copy of `encoder` and a classifier on all images of `train`."""
    if train.labels is None or test.labels is None:
        raise DataError("fine-tuning needs labels")
    if len(train) < 2:
        raise DataError("fine-tuning needs at least two labelled images")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive(seed, "classifier"))
        network = _Network(copy.deepcopy(encoder), classes)
    trainer = _Trainer(network, train, options, engine, seed, encoder_lr or options.encoder_lr)
    trainer.train(options.epochs)
    return trainer.accuracy(test)


class _Network(nn.Module):
    """Encoder and linear classifier."""

    def __init__(self, encoder: nn.Module, classes: int) -> None:
        super().__init__()
        self.encoder = encoder.requires_grad_(True)
        self.classifier = nn.Linear(int(encoder.features), classes)  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.encoder(x))  # type: ignore[no-any-return]


class _Trainer:
    """Supervised training of one network on the labelled images of one device.

    order: (batches, B) an epoch's batches, `position` the next one.
    """

    def __init__(
        self, network: _Network, data: ImageSet, options: FinetuneOptions, engine: Engine, seed: int, encoder_lr: float
    ) -> None:
        assert data.labels is not None
        self.images, self.labels, self.options, self.engine = data.images, data.labels, options, engine
        device = data.images.device
        self.model = FlatModel(network, device)
        use_fused(network.train(), engine.fused)
        self.gradients = self.model.gradients()
        self.half = HalfWeights(self.model) if device.type == "cuda" and engine.precision == torch.bfloat16 else None
        self.optimizer = self._optimizer(encoder_lr)
        self.seed = derive(seed, "fine-tuning noise")
        self.noise = torch.Generator(device).manual_seed(self.seed)
        self.shuffle = generator("cpu", seed, "fine-tuning order")
        self.order = torch.zeros(
            max(-(-len(data) // options.batch_size), WARM_UP + 1), options.batch_size, dtype=torch.int64, device=device
        )
        self.position = torch.zeros(1, dtype=torch.int64, device=device)
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.captured = (
            CapturedSteps(self._train_on_next, self.stream, self.noise) if self.stream and engine.graph else None
        )

    def train(self, epochs: int) -> None:
        """`epochs` passes over the images."""
        if self.captured:
            self._capture()
        if self.stream:
            self.stream.wait_stream(torch.cuda.current_stream(self.stream.device))
        for _ in range(epochs):
            batches = list(self._batches())
            self._load(batches)
            with torch.cuda.stream(self.stream):
                for batch in batches:
                    self.captured(len(batch), 0.0) if self.captured else self._train_on_next(len(batch))
        if self.stream:
            self.stream.synchronize()

    @torch.no_grad()
    def accuracy(self, test: ImageSet, batch_size: int = 512) -> float:
        """In percent, with batch norm in evaluation mode."""
        assert test.labels is not None
        network = self.model.module.eval()
        logits = torch.cat([network(plain_view(part)) for part in test.images.split(batch_size)])
        network.train()
        if not bool(logits.isfinite().all()):
            raise TrainingError("fine-tuning diverged: lower finetune.classifier_lr, encoder_lr or scratch_lr")
        return 100 * float((logits.argmax(1) == test.labels).float().mean())

    def _optimizer(self, encoder_lr: float) -> torch.optim.Optimizer:
        """SGD with two learning rates, on two stretches of the model's vector."""
        options, groups = self.options, []
        assert self.model.trained.grad is not None
        for section, lr in (("encoder", encoder_lr), ("classifier", options.classifier_lr)):
            span = self.model.layout.span(section)
            parameter = nn.Parameter(self.model.params[span])
            parameter.grad = self.model.trained.grad[span]
            groups.append({"params": [parameter], "lr": lr})
        fused = self.images.is_cuda
        return torch.optim.SGD(groups, momentum=options.momentum, weight_decay=options.weight_decay, fused=fused)

    def _batches(self) -> Iterator[Tensor]:
        """An epoch in random order; a last batch of a single image is left out, as batch norm needs company."""
        order = torch.randperm(len(self.images), generator=self.shuffle)
        yield from (batch for batch in order.split(self.options.batch_size) if len(batch) > 1)

    def _load(self, batches: list[Tensor]) -> None:
        host = torch.zeros(len(batches), self.order.shape[1], dtype=torch.int64, pin_memory=self.stream is not None)
        for row, batch in zip(host, batches, strict=True):
            row[: len(batch)] = batch
        with torch.cuda.stream(self.stream):
            self.order[: len(batches)].copy_(host, non_blocking=True)
            self.position.zero_()

    def _train_on_next(self, size: int) -> None:
        """One step on the next batch; this is what a graph captures."""
        indices = self.order.index_select(0, self.position)[0, :size]
        half_precision = self.engine.precision == torch.bfloat16
        dtype = torch.bfloat16 if self.half else torch.float32
        with self.half.in_use() if self.half else contextlib.nullcontext():
            recipes = RECIPES["weak"]
            view, _ = training_views(self.images, indices, recipes, self.noise, fused=self.engine.fused, dtype=dtype)
            with torch.autocast(self.images.device.type, torch.bfloat16, enabled=half_precision):
                logits = self.model.module(view)
            loss = F.cross_entropy(logits.float(), self.labels[indices])
            backward(loss, self.model, self.gradients, self.half)
        self.optimizer.step()
        self.position += 1

    def _capture(self) -> None:
        """Capture the steps of both sizes; the rehearsals leave no trace."""
        assert self.captured
        params, buffers = self.model.params.clone(), self.model.buffers.clone()
        sizes = {len(batch) for batch in torch.arange(len(self.images)).split(self.options.batch_size)} - {1}
        for size in sorted(sizes, reverse=True):
            self._load([torch.arange(size)] * (WARM_UP + 1))
            self.captured.capture(size, 0.0)
        if self.stream:
            self.stream.synchronize()
        self.model.params.copy_(params)
        self.model.buffers.copy_(buffers)
        if self.captured.refusal:  # the generator still believes that it is being captured
            self.noise = torch.Generator(self.noise.device)
        self.noise.manual_seed(self.seed)
        for state in self.optimizer.state.values():
            for value in state.values():
                if isinstance(value, Tensor):
                    value.zero_()
