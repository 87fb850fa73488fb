"""All clients in this process, one after another, on one device.

One model serves every client: its vectors are overwritten in place, and nothing is rebuilt between clients.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from fedu2.data import ImageSet
from fedu2.errors import TrainingError
from fedu2.federation.backend import EpochReport, Observer
from fedu2.federation.batches import batches_in_epoch, local_batches
from fedu2.federation.optimizers import make_optimizer
from fedu2.methods import Batch, Learner, Memory, Method, Reply, ServerState, Task
from fedu2.models.flat import FlatModel
from fedu2.seeds import generator
from fedu2.views import two_views, views_for

__all__ = ["LocalBackend", "train_client"]


class LocalBackend:
    """Runs tasks sequentially on the device where the images are."""

    def __init__(self, method: Method, images: ImageSet, shares: Sequence[Tensor]) -> None:
        self.method = method
        self.images = images.images
        self.shares = shares
        self.model = FlatModel(method.learner(), self.images.device)

    def run(
        self, tasks: Sequence[Task], server: ServerState, memories: Mapping[int, Memory], observer: Observer
    ) -> Iterator[Reply]:
        """Train the tasks in order."""
        for task in tasks:
            memory = memories.get(task.client)
            self.method.receive(self.model, server, memory, task)
            share = self.shares[task.client]
            samples, metrics = train_client(self.method, self.model, self.images, share, task, observer)
            yield Reply(
                client=task.client,
                examples=len(share),
                samples=samples,
                model=self.model.state(*self.method.travelling(self.model)),
                memory=self.method.remember(self.model, memory, task),
                payload=self.method.payload(self.model, task),
                metrics=metrics,
            )


def train_client(
    method: Method, model: Learner, images: Tensor, share: Tensor, task: Task, observer: Observer
) -> tuple[int, dict[str, float]]:
    """Local training, in place: the steps of `task` on `method.loss`; images trained on, and the means of the terms."""
    experiment, learner = method.experiment, model.module
    learner.train()
    recipes = views_for(experiment.views, str(experiment.objective))
    order = generator("cpu", experiment.seed, "order", task.round, task.client)
    noise = generator(images.device, experiment.seed, "noise", task.round, task.client)
    optimizer = make_optimizer([model.trained], experiment.optimizer, task.lr)

    batches = batches_in_epoch(len(share), experiment)
    history: list[Tensor] = []  # (terms,) a step, on the device until an epoch is over
    reported = samples = 0
    sums: dict[str, float] = {}

    for step, indices in enumerate(local_batches(share, task.steps, experiment, order), start=1):
        views = two_views(images[indices.to(images.device)], recipes, noise)
        batch = Batch(*map(_channels_last, views))
        with torch.autocast(images.device.type, torch.bfloat16, enabled=experiment.precision == "bfloat16"):
            loss, terms = method.loss(learner, batch, noise)
        model.grads.zero_()
        loss.backward()
        optimizer.step()
        learner.after_step(task.progress)

        history.append(torch.stack([term.float() for term in terms.values()]))
        samples += len(indices)
        if step % batches == 0 or step == task.steps:
            means = _read(tuple(terms), history, task, step)
            for name, mean in means.items():
                sums[name] = sums.get(name, 0.0) + mean * len(history)
            observer.on_epoch(EpochReport(task, step, samples - reported, means))
            history, reported = [], samples
    return samples, {name: value / task.steps for name, value in sums.items()}


def _channels_last(view: Tensor) -> Tensor:
    """The memory order in which convolutions are faster, on CPUs and on tensor cores; they hand it on."""
    return view.contiguous(memory_format=torch.channels_last)


def _read(names: Sequence[str], history: Sequence[Tensor], task: Task, step: int) -> dict[str, float]:
    """The means of the terms since the last reading; the only time that the device is waited for."""
    table = torch.stack(list(history)).cpu()  # (steps, terms)
    broken = (~table.isfinite()).nonzero()
    if len(broken):
        row, column = broken[0].tolist()
        value, first = table[row, column].item(), step - len(table) + row + 1
        where = f"round {task.round}, client {task.client}, step {first}"
        raise TrainingError(f"{names[column]} became {value} in {where}")
    return dict(zip(names, table.mean(0).tolist(), strict=True))
