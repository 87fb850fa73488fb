"""Chance: what is to be done to each image of a batch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from fedu2.views.recipes import Recipe

__all__ = ["ASPECT", "ATTEMPTS", "NO_BLUR", "Box", "ViewParameters", "draw", "parameters", "row_of", "uniforms"]

ASPECT = (3 / 4, 4 / 3)  # width / height of crops, drawn log-uniformly
ATTEMPTS = 10  # crop boxes drawn before the whole image is taken
NO_BLUR = 1e-3  # a σ, in pixels, at which the Gaussian's weights are exactly those of the identity


class Numbers(NamedTuple):
    """The rows of `uniforms` after areas and aspects, in their order: (B,) each."""

    top: Tensor
    left: Tensor
    flip: Tensor
    gray: Tensor
    blur: Tensor
    sigma: Tensor
    invert: Tensor
    jitter: Tensor
    brightness: Tensor
    contrast: Tensor
    saturation: Tensor
    hue: Tensor


ROWS = 2 * ATTEMPTS + len(Numbers._fields)


def row_of(name: str) -> int:
    """Where a number of that name stands in `uniforms`."""
    return 2 * ATTEMPTS + Numbers._fields.index(name)


class Box(NamedTuple):
    """Crop boxes in whole pixels, and whether the crop is mirrored (1) or not (0): (B,) floats."""

    top: Tensor
    left: Tensor
    height: Tensor
    width: Tensor
    flip: Tensor


@dataclass(frozen=True)
class ViewParameters:
    """What is done to each image: (B,) floats, or None for an operation that the recipe never uses."""

    box: Box | None = None
    brightness: Tensor | None = None  # factor, 1: none
    contrast: Tensor | None = None  # factor, 1: none
    saturation: Tensor | None = None  # factor, 1: none
    hue: Tensor | None = None  # shift in turns, 0: none
    colour: Tensor | None = None  # 0: made gray, 1: kept
    blur: Tensor | None = None  # σ in pixels, NO_BLUR: none
    solarize: Tensor | None = None  # 1: solarised, 0: none
    size: int | None = None  # side to which boxes are stretched, if not the image's


def draw(recipe: Recipe, batch: int, size: int, generator: torch.Generator) -> ViewParameters:
    """Parameters for `batch` images of `size` × `size` pixels, on the generator's device."""
    return parameters(recipe, size, uniforms(batch, generator))


def uniforms(batch: int, generator: torch.Generator) -> Tensor:
    """All chance in one view of `batch` images: (ROWS, B) numbers, uniform in [0, 1).

    Every recipe consumes the same random numbers in the same places: switching one operation off leaves the
    others as they were.
    """
    return torch.rand((ROWS, batch), generator=generator, device=generator.device)


def parameters(recipe: Recipe, size: int, uniform: Tensor) -> ViewParameters:
    """Parameters for images of `size` × `size` pixels from the numbers of `uniforms`."""
    areas, aspects, others = uniform[:ATTEMPTS], uniform[ATTEMPTS : 2 * ATTEMPTS], uniform[2 * ATTEMPTS :]
    numbers = Numbers(*others.unbind())

    moves = recipe.crop_scale != (1.0, 1.0) or recipe.flip > 0 or recipe.size is not None
    jittered = numbers.jitter < recipe.jitter if recipe.jitter else None
    blurred = numbers.blur < recipe.blur if recipe.blur else None
    return ViewParameters(
        box=_draw_box(recipe, size, areas, aspects, numbers) if moves else None,
        brightness=_draw_factor(numbers.brightness, recipe.brightness, jittered),
        contrast=_draw_factor(numbers.contrast, recipe.contrast, jittered),
        saturation=_draw_factor(numbers.saturation, recipe.saturation, jittered),
        hue=_draw_hue(numbers.hue, recipe.hue, jittered),
        colour=(numbers.gray >= recipe.grayscale).float() if recipe.grayscale else None,
        blur=_where(blurred, _between(numbers.sigma, *recipe.blur_sigma), NO_BLUR),
        solarize=(numbers.invert < recipe.solarize).float() if recipe.solarize else None,
        size=recipe.size,
    )


def _draw_box(recipe: Recipe, size: int, areas: Tensor, aspects: Tensor, numbers: Numbers) -> Box:
    """The first of ATTEMPTS boxes that fits into the image, else the whole image.

    All tensors are uniform in [0, 1): areas and aspects (ATTEMPTS, B), `numbers` (B,).
    """
    area = _between(areas, *recipe.crop_scale) * size**2
    aspect = _between(aspects, math.log(ASPECT[0]), math.log(ASPECT[1])).exp()
    # One more row holds the whole image: it always fits.
    width = F.pad((area * aspect).sqrt().round(), (0, 0, 0, 1), value=size)
    height = F.pad((area / aspect).sqrt().round(), (0, 0, 0, 1), value=size)
    fits = (torch.minimum(width, height) >= 1) & (torch.maximum(width, height) <= size)
    chosen = fits.to(torch.uint8).argmax(dim=0, keepdim=True)  # the first of equals
    width, height = width.gather(0, chosen).squeeze(0), height.gather(0, chosen).squeeze(0)
    return Box(
        top=(numbers.top * (size - height + 1)).floor(),
        left=(numbers.left * (size - width + 1)).floor(),
        height=height,
        width=width,
        flip=(numbers.flip < recipe.flip).float(),
    )


def _draw_factor(uniform: Tensor, strength: float, jittered: Tensor | None) -> Tensor | None:
    """Factors in [max(0, 1 − strength), 1 + strength]; 1 where the image is not jittered."""
    low, high = max(0.0, 1 - strength), 1 + strength
    return _where(jittered, _between(uniform, low, high), 1.0) if strength else None


def _draw_hue(uniform: Tensor, strength: float, jittered: Tensor | None) -> Tensor | None:
    """Shifts in [−strength, strength]; 0 where the image is not jittered."""
    return _where(jittered, _between(uniform, -strength, strength), 0.0) if strength else None


def _where(chosen: Tensor | None, values: Tensor, neutral: float) -> Tensor | None:
    """`values` for the chosen images, `neutral` for others; None when the recipe never chooses any."""
    return None if chosen is None else torch.where(chosen, values, neutral)


def _between(uniform: Tensor, low: float, high: float) -> Tensor:
    return low + (high - low) * uniform
