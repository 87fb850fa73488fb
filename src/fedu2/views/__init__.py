"""Random views of a whole batch, on the images' device.

A view is made in two steps. `draw` turns a `Recipe` and a generator into `ViewParameters`: one number per
image and operation, neutral (factor 1, shift 0, ...) where chance leaves the image alone. `apply` carries
them out, as pure tensor operations over the batch. Shapes never depend on data and nothing is read back by
the host, so that a training step with its views can be captured in a CUDA graph; an operation that a recipe
never uses costs nothing.

The operations and their ranges are those of torchvision's RandomResizedCrop, RandomHorizontalFlip,
ColorJitter (in the fixed order brightness, contrast, saturation, hue), RandomGrayscale, GaussianBlur and
RandomSolarize.

Where Triton and a GPU are, `training_views` makes the same views by one kernel.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fedu2.errors import DataError
from fedu2.kernels import load
from fedu2.views.operations import apply
from fedu2.views.parameters import Box, ViewParameters, draw, uniforms
from fedu2.views.recipes import RECIPES, Recipe, views_for

__all__ = [
    "MEAN",
    "RECIPES",
    "STD",
    "Box",
    "Recipe",
    "ViewParameters",
    "apply",
    "draw",
    "normalize",
    "plain_view",
    "random_view",
    "to_float",
    "training_views",
    "two_views",
    "uniforms",
    "views_for",
]

MEAN, STD = 0.5, 0.25
"""The same for all data sets: own statistics would have to be pooled from all sites before training, and
would tell something of each site's images. These bring natural images near zero mean and unit variance."""


def to_float(images: Tensor) -> Tensor:
    """uint8 in 0..255 → float32 in [0, 1]."""
    return images.to(torch.float32) / 255


def normalize(x: Tensor) -> Tensor:
    """(x − MEAN) / STD."""
    return (x - MEAN).div_(STD)


def plain_view(images: Tensor) -> Tensor:
    """The images as an encoder sees them in evaluation: uint8 (B, 3, S, S) → normalised float32."""
    return normalize(to_float(_checked(images)))


def random_view(images: Tensor, recipe: Recipe, generator: torch.Generator) -> Tensor:
    """One random view of uint8 images (B, 3, S, S) as normalised float32; `generator` is on their device."""
    batch, _, size, _ = _checked(images).shape
    return normalize(apply(to_float(images), draw(recipe, batch, size, generator)))


def two_views(
    images: Tensor,
    recipes: tuple[Recipe, Recipe],
    generator: torch.Generator,
) -> tuple[Tensor, Tensor]:
    """Two random views of each image, see `random_view`."""
    first, second = recipes
    return random_view(images, first, generator), random_view(images, second, generator)


def training_views(
    images: Tensor,
    indices: Tensor,
    recipes: tuple[Recipe, Recipe],
    generator: torch.Generator,
    *,
    fused: bool,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """`two_views` of images[indices] in the memory order and `dtype` that an encoder is trained with.

    Channels come last: convolutions are faster so, on CPUs and on tensor cores, and hand the order on. Fused, one
    kernel does it all where it can (see `kernel.supported`). Either way the generator is consumed alike, and the
    views are the same up to rounding.
    """
    kernel, indices = load("views") if fused else None, indices.to(images.device)
    if kernel is not None and kernel.supported(_checked(images), recipes):
        numbers = uniforms(len(indices), generator), uniforms(len(indices), generator)
        views: tuple[Tensor, Tensor] = kernel.fused_views(images, indices, recipes, numbers, dtype)
        return views
    first, second = two_views(images[indices], recipes, generator)
    return _channels_last(first.to(dtype)), _channels_last(second.to(dtype))


def _channels_last(view: Tensor) -> Tensor:
    return view.contiguous(memory_format=torch.channels_last)


def _checked(images: Tensor) -> Tensor:
    square_rgb = images.ndim == 4 and images.shape[1] == 3 and images.shape[2] == images.shape[3]
    if images.dtype != torch.uint8 or not square_rgb:
        got = f"{images.dtype} {tuple(images.shape)}"
        raise DataError(f"images must be a batch of square RGB bytes, uint8 (B, 3, S, S), not {got}")
    return images
