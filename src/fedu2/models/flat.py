"""A model as two vectors.

`FlatModel` moves all parameters of a module into one contiguous vector and all floating-point buffers into another,
with the module's own tensors as views into them. Switching a client is then two copies, an optimizer sees one
tensor, and the server works on a K×P matrix. Kernels of convolutions lie in the order in which tensor cores read
them (channels last), so that half-precision copies of all weights are one cast of the whole vector.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor, nn

from fedu2.errors import UsageError

__all__ = ["Entry", "FlatModel", "Layout", "ModelState"]

Module = TypeVar("Module", bound=nn.Module)


@dataclass(frozen=True)
class ModelState:
    """The part of a model that travels: parameters (P,) and batch-norm buffers (Q,), both float32."""

    params: Tensor
    buffers: Tensor


@dataclass(frozen=True)
class Entry:
    """One named tensor inside a vector."""

    name: str
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def section(self) -> str:
        """The child of the model that the tensor belongs to."""
        return self.name.partition(".")[0]


@dataclass(frozen=True)
class Layout:
    """Where each named tensor lies in a vector."""

    entries: tuple[Entry, ...]

    @classmethod
    def of(cls, tensors: Iterable[tuple[str, Tensor]]) -> Layout:
        entries, start = [], 0
        for name, tensor in tensors:
            entries.append(Entry(name, tuple(tensor.shape), start, start + tensor.numel()))
            start += tensor.numel()
        return cls(tuple(entries))

    @property
    def size(self) -> int:
        return self.entries[-1].stop if self.entries else 0

    def span(self, section: str) -> slice:
        """The stretch that one section occupies."""
        mine = [entry for entry in self.entries if entry.section == section]
        return slice(mine[0].start, mine[-1].stop) if mine else slice(0, 0)

    def prefix(self, left_out: Iterable[str]) -> Layout:
        """The layout without some sections, which must be the last ones."""
        unwanted = set(left_out)
        kept = tuple(entry for entry in self.entries if entry.section not in unwanted)
        if any(a is not b for a, b in zip(kept, self.entries, strict=False)):
            raise UsageError(f"sections that stay must come last in the model, but {sorted(unwanted)} do not")
        return Layout(kept)

    def views(self, vector: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Each tensor by name, as a view into `vector`."""
        for entry in self.entries:
            yield entry.name, _shaped(vector[entry.start : entry.stop], entry.shape)

    def vector(self, tensors: Mapping[str, Tensor], device: torch.device | str) -> Tensor:
        """One float32 vector of the named tensors; ValueError where one is of another shape, or no real numbers."""
        vector = torch.empty(self.size, device=device)
        for name, view in self.views(vector):
            _check_tensor(name, tensors[name], view.shape)
            view.copy_(tensors[name].detach())
        return vector


class FlatModel(Generic[Module]):
    """A module that lives in two vectors.

    params: (P,) all parameters, the trained ones first.  trained: (T,) the leading, trained part of `params`.
    buffers: (Q,) floating-point buffers.
    """

    def __init__(self, module: Module, device: torch.device | str = "cpu") -> None:
        self.module = module.to(device)
        _forget_counters(module)
        parameters = sorted(module.named_parameters(), key=lambda item: not item[1].requires_grad)  # stable
        buffers = [(name, b) for name, b in module.named_buffers() if b.is_floating_point()]
        # Counters and tables of integers belong to no vector: every client finds them as they were.
        self._integers = [(b, b.clone()) for b in module.buffers() if not b.is_floating_point()]
        self.layout = Layout.of(parameters)
        self.buffer_layout = Layout.of(buffers)
        _check_sections(parameters)

        self.params = self.layout.vector(dict(parameters), device)
        self.buffers = self.buffer_layout.vector(dict(buffers), device)
        trained = sum(p.numel() for _, p in parameters if p.requires_grad)
        self.trained = nn.Parameter(self.params[:trained])

        for (_, parameter), (_, view) in zip(parameters, self.layout.views(self.params), strict=True):
            parameter.data = view
        for (_, buffer), (_, view) in zip(buffers, self.buffer_layout.views(self.buffers), strict=True):
            buffer.data = view

    def gradients(self) -> list[tuple[nn.Parameter, Tensor]]:
        """Each trained parameter with its part of `trained.grad` (T,), which is made here at the first call."""
        if self.trained.grad is None:
            self.trained.grad = torch.zeros_like(self.trained)
        parameters = dict(self.module.named_parameters())
        trained = Layout(tuple(e for e in self.layout.entries if parameters[e.name].requires_grad))
        return [(parameters[name], view) for name, view in trained.views(self.trained.grad)]

    def load(self, state: ModelState) -> None:
        """Overwrite the leading part of the model with a state that travelled."""
        self.params[: len(state.params)].copy_(state.params)
        self.buffers[: len(state.buffers)].copy_(state.buffers)
        for buffer, initial in self._integers:
            buffer.copy_(initial)

    def state(self, params: int, buffers: int) -> ModelState:
        """A copy of the leading `params` parameters and `buffers` buffers."""
        return ModelState(self.params[:params].clone(), self.buffers[:buffers].clone())

    def section(self, name: str) -> ModelState:
        """Views of one section's parameters and buffers (writing to them changes the model)."""
        return ModelState(self.params[self.layout.span(name)], self.buffers[self.buffer_layout.span(name)])


def _forget_counters(module: nn.Module) -> None:
    """Drop batch norm's step counters: with a fixed momentum nothing reads them, and integers do not average."""
    for child in module.modules():
        if isinstance(child, nn.modules.batchnorm._BatchNorm) and child.momentum is not None:
            child.num_batches_tracked = None


def _check_sections(parameters: list[tuple[str, nn.Parameter]]) -> None:
    sections: dict[str, bool] = {}
    for name, parameter in parameters:
        if parameter.dtype != torch.float32:
            raise UsageError(f"parameter {name!r} is {parameter.dtype}; models are trained with float32 weights")
        section = name.partition(".")[0]
        if sections.setdefault(section, parameter.requires_grad) != parameter.requires_grad:
            raise UsageError(
                f"section {section!r} of the model is trained only in part: {name!r} differs from the rest"
            )


def _check_tensor(name: str, tensor: Tensor, shape: torch.Size) -> None:
    if tensor.shape != shape or not tensor.is_floating_point():
        found, wanted = f"{tensor.dtype} {tuple(tensor.shape)}", f"floating point {tuple(shape)}"
        raise ValueError(f"tensor {name!r} is {found} in place of {wanted}")


def _shaped(stretch: Tensor, shape: tuple[int, ...]) -> Tensor:
    """A stretch of a vector in the shape of a tensor; (O, I, H, W) lies there as (O, H, W, I)."""
    if len(shape) != 4:
        return stretch.view(shape)
    outputs, inputs, height, width = shape
    return stretch.view(outputs, height, width, inputs).permute(0, 3, 1, 2)
