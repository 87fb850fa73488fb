"""One optimizer step of a client, in place: gather, views, loss, backward, optimizer, target network.

The same code runs on a CPU, step by step on a GPU, or captured in a CUDA graph: nothing in it waits for the device, and
what changes between clients (model, optimizer state, learning rate, noise) is overwritten where it lies.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from fedu2.engine import Engine
from fedu2.federation.optimizers import make_optimizer, restart
from fedu2.kernels import fused
from fedu2.methods import Batch, Learner, Method, Task
from fedu2.models.flat import FlatModel, Layout
from fedu2.models.norm import Norm, only_our_norms, use_fused
from fedu2.objectives import Objective
from fedu2.seeds import derive
from fedu2.views import training_views, views_for

__all__ = ["WATCHED", "HalfWeights", "Step", "aligned", "backward"]

WATCHED = ("the gradient", "a batch-norm buffer")  # that they are numbers is looked at, beside the terms of the loss
ALIGNMENT = 8  # numbers: 16 bytes in half precision, without which cuDNN takes kernels that are ten times slower


class Step:
    """A client's training step on `model`, with everything that it overwrites."""

    def __init__(self, method: Method, model: Learner, images: Tensor, engine: Engine) -> None:
        experiment = method.experiment
        self.method, self.model, self.images, self.engine = method, model, images, engine
        self.learner = model.module.train()
        self.recipes = views_for(experiment.views, str(experiment.objective))
        self.noise = torch.Generator(images.device)
        self.gradients = model.gradients()
        self.optimizer = make_optimizer(model.trained, experiment.optimizer, on_gpu=images.is_cuda)
        self.half = HalfWeights(model) if images.is_cuda and engine.precision == torch.bfloat16 else None
        self.progress = 0.0
        self.progress_there = torch.zeros((), device=images.device)  # the same, for captured steps
        self.names: tuple[str, ...] = ()  # of the terms, known after the first step
        # Both views in one pass: half the kernels, and enough work in each for a large GPU.
        self.learner.paired = engine.fused and _keeps_views_apart(self.learner)
        compiled = engine.compile and not self.learner.paired
        # Not both: the compiler looks into hand-written kernels, and makes illegal memory accesses of our norms.
        use_fused(self.learner, engine.fused and not compiled)
        if compiled:
            self.learner.compile()

    def begin(self, task: Task) -> None:
        """A client's first step comes next: its own noise and learning rate, and an optimizer without a past."""
        self.noise.manual_seed(derive(self.method.experiment.seed, "noise", task.round, task.client))
        self.progress = task.progress
        self.progress_there.fill_(task.progress)
        self.learner.train()
        restart(self.optimizer, task.lr)

    def __call__(self, indices: Tensor) -> Tensor:
        """Train on the images at indices[0] (N,), on their device; a row (terms + 2,) for `Reading`, on the device.

        indices: (1, N), or (2, N) for a method that wants other images beside each batch.
        """
        engine = self.engine
        dtype = torch.bfloat16 if self.half else torch.float32
        with fused(engine.fused), self._weights():
            views, *others = [
                training_views(self.images, row, self.recipes, self.noise, fused=engine.fused, dtype=dtype)
                for row in indices
            ]
            batch = Batch(*views, others[0][0] if others else None, self.progress_there)
            with torch.autocast(self.images.device.type, torch.bfloat16, enabled=engine.precision == torch.bfloat16):
                loss, terms = self.method.loss(self.learner, batch, self.noise)
            backward(loss, self.model, self.gradients, self.half)
        self.optimizer.step()
        self.learner.after_step(self.progress)
        self.names = tuple(terms)
        assert self.model.trained.grad is not None, "gradients() made it"
        watched = [_largest(vector) for vector in (self.model.trained.grad, self.model.buffers)]
        return torch.stack([*(term.float() for term in terms.values()), *watched])

    def _weights(self) -> contextlib.AbstractContextManager[None]:
        return self.half.in_use() if self.half else contextlib.nullcontext()


def backward(
    loss: Tensor, model: FlatModel[Any], gradients: list[tuple[nn.Parameter, Tensor]], half: HalfWeights | None
) -> None:
    """Gradients into `model.trained.grad`: added up in place, or on a GPU collected by a few kernels.

    gradients: what `model.gradients()` gave.  half: the copies that the loss was computed with, if any.
    """
    if not loss.is_cuda:
        model.trained.grad.zero_()  # type: ignore[union-attr]
        for parameter, gradient in gradients:  # in every step: a method may have cleared them
            parameter.grad = gradient
        loss.backward()
        return
    holders = half.holders(gradients) if half else gradients
    for holder, _ in holders:
        holder.grad = None
    loss.backward()
    missing = [gradient for holder, gradient in holders if holder.grad is None]
    if missing:
        torch._foreach_zero_(missing)
    found = [(gradient, holder.grad) for holder, gradient in holders if holder.grad is not None]
    for kind in (torch.bfloat16, torch.float32):
        alike = [(gradient, new) for gradient, new in found if new.dtype == kind]
        if alike:
            torch._foreach_copy_([gradient for gradient, _ in alike], [new for _, new in alike])


def _largest(vector: Tensor) -> Tensor:
    """max |x_i|: NaN or infinite as soon as one of them is, found in one pass; 0 where there are none."""
    if len(vector) == 0:
        return vector.new_zeros(())
    low, high = torch.aminmax(vector)
    return torch.maximum(high, -low)


def _keeps_views_apart(learner: Objective) -> bool:
    """Whether two stacked batches of views do not mix: known of encoders built with our norm, and of no others."""
    return only_our_norms(learner) and any(isinstance(child, Norm) for child in learner.encoder.modules())


def aligned(layout: Layout) -> Layout:
    """The same tensors, each at a multiple of ALIGNMENT."""
    entries, start = [], 0
    for entry in layout.entries:
        stop = start + entry.stop - entry.start
        entries.append(replace(entry, start=start, stop=stop))
        start = -(-stop // ALIGNMENT) * ALIGNMENT
    return Layout(tuple(entries))


def _stretches(here: Layout, there: Layout) -> list[tuple[int, int, int]]:
    """What to copy from one layout to the other, as few times as possible: (start here, start there, length)."""
    stretches: list[tuple[int, int, int]] = []
    for a, b in zip(here.entries, there.entries, strict=True):
        begin, target, length = stretches[-1] if stretches else (0, 0, 0)
        if stretches and (a.start, b.start) == (begin + length, target + length):
            stretches[-1] = begin, target, length + a.stop - a.start
        else:
            stretches.append((a.start, b.start, a.stop - a.start))
    return stretches


class HalfWeights:
    """bfloat16 copies of the weights of convolutions and linear layers, made by one cast of the whole vector.

    Autocast would cast every weight by a kernel of its own, and every gradient back: some 200 launches a step.
    The float32 weights stay the ones that the optimizer, the target network and the server see.
    """

    def __init__(self, model: FlatModel[Any]) -> None:
        self.model = model
        places = aligned(model.layout)
        self.vector = torch.zeros(places.size, dtype=torch.bfloat16, device=model.params.device)
        self.stretches = [
            (self.vector[there : there + length], model.params[here : here + length])
            for here, there, length in _stretches(model.layout, places)
        ]
        copies = dict(places.views(self.vector))
        readers = [child for child in model.module.modules() if isinstance(child, nn.Conv2d | nn.Linear)]
        read = {id(master) for reader in readers for master in reader.parameters(recurse=False)}
        self.copy_of = {
            id(master): nn.Parameter(copies[name], requires_grad=master.requires_grad)
            for name, master in model.module.named_parameters()
            if id(master) in read
        }
        self.slots = [
            (reader, name, master, self.copy_of[id(master)])  # two readers may share one weight
            for reader in readers
            for name, master in reader.named_parameters(recurse=False)
        ]

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """Refresh the copies, and put them in the place of the weights."""
        for copy, weights in self.stretches:  # mostly one
            copy.copy_(weights)
        for owner, name, _, copy in self.slots:
            owner._parameters[name] = copy
        try:
            yield
        finally:
            for owner, name, master, _ in self.slots:
                owner._parameters[name] = master

    def holders(self, gradients: list[tuple[nn.Parameter, Tensor]]) -> list[tuple[nn.Parameter, Tensor]]:
        """For each stretch of the gradient, the parameter on which backward leaves it."""
        return [(self.copy_of.get(id(parameter), parameter), gradient) for parameter, gradient in gradients]
