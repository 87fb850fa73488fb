"""Views against Pillow, kornia, colorsys and per-image loops; drawn parameters against distributions."""

from __future__ import annotations

import colorsys
import math
import random
from dataclasses import fields, replace

import kornia
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageEnhance, ImageOps
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fedu2.errors import DataError, UsageError
from fedu2.options import ViewOptions
from fedu2.views import (
    RECIPES,
    Box,
    Recipe,
    ViewParameters,
    apply,
    draw,
    normalize,
    plain_view,
    random_view,
    to_float,
    two_views,
    views_for,
)
from fedu2.views.operations import (
    adjust_brightness,
    adjust_contrast,
    adjust_hue,
    adjust_saturation,
    gaussian_blur,
    resized_crop,
    solarize,
)
from fedu2.views.parameters import NO_BLUR

BYTE = 1 / 255
EVERYTHING = Recipe((0.08, 1.0), 0.5, 0.8, 0.4, 0.4, 0.4, 0.1, 0.2, 0.5, (0.1, 2.0), 0.2)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def some_images(batch: int = 6, size: int = 32, seed: int = 0) -> Tensor:
    """Smooth colour fields with noise: both structure and detail for resizing and blurring to work on."""
    generator = seeded(seed)
    coarse = torch.rand(batch, 3, 4, 4, generator=generator)
    smooth = torch.nn.functional.interpolate(coarse, size=(size, size), mode="bicubic")
    noise = 0.15 * torch.randn(batch, 3, size, size, generator=generator)
    return ((smooth + noise).clamp(0, 1) * 255).round().to(torch.uint8)


def to_pil(image: Tensor) -> Image.Image:
    return Image.fromarray(image.permute(1, 2, 0).numpy())


def from_pil(image: Image.Image) -> Tensor:
    return torch.from_numpy(np.asarray(image).copy()).permute(2, 0, 1).float() / 255


# ----------------------------------------------------------------------- operations against references


def pil_resized_crop(image: Tensor, top: int, left: int, height: int, width: int, flip: bool) -> Tensor:
    """Crop, then resize, then flip each channel as a floating-point Pillow image."""
    size = image.shape[-1]
    channels = []
    for channel in image:
        cut = Image.fromarray(channel.numpy()).crop((left, top, left + width, top + height))
        resized = cut.resize((size, size), Image.Resampling.BILINEAR)
        channels.append(torch.from_numpy(np.asarray(ImageOps.mirror(resized) if flip else resized).copy()))
    return torch.stack(channels)


@settings(max_examples=40, derandomize=True)
@given(data=st.data(), size=st.sampled_from([8, 32, 33]))
def test_resized_crop_is_pillows_crop_then_resize(data: st.DataObject, size: int) -> None:
    x = to_float(some_images(3, size))
    boxes = []
    for _ in range(3):
        height, width = data.draw(st.integers(1, size)), data.draw(st.integers(1, size))
        top, left = data.draw(st.integers(0, size - height)), data.draw(st.integers(0, size - width))
        boxes.append((top, left, height, width, data.draw(st.booleans())))
    views = resized_crop(x, *torch.tensor(boxes, dtype=torch.float32).unbind(1))
    for image, box, view in zip(x, boxes, views, strict=True):
        torch.testing.assert_close(view, pil_resized_crop(image, *box), atol=2e-6, rtol=0)


@settings(max_examples=30, derandomize=True)
@given(data=st.data(), side=st.sampled_from([5, 24, 32, 47]))
def test_a_crop_is_stretched_to_any_side(data: st.DataObject, side: int) -> None:
    x = to_float(some_images(1, 32))
    height, width = data.draw(st.integers(1, 32)), data.draw(st.integers(1, 32))
    top, left = data.draw(st.integers(0, 32 - height)), data.draw(st.integers(0, 32 - width))
    flip = data.draw(st.booleans())
    box = (torch.tensor([float(v)]) for v in (top, left, height, width, flip))
    cut = x[:, :, top : top + height, left : left + width]
    expected = torch.nn.functional.interpolate(cut, (side, side), mode="bilinear", align_corners=False)
    view = resized_crop(x, *box, size=side)
    torch.testing.assert_close(view, expected.flip(-1) if flip else expected, atol=2e-6, rtol=0)


@pytest.mark.parametrize("name", RECIPES)
def test_views_have_the_side_that_a_recipe_asks_for(name: str) -> None:
    recipes = (replace(RECIPES[name][0], size=24), replace(RECIPES[name][1], size=24))
    for view in two_views(some_images(3, 32), recipes, seeded()):
        assert view.shape == (3, 3, 24, 24)
    whole = random_view(some_images(3, 32), Recipe(size=32), seeded())  # no crop, no flip: the image itself
    assert torch.equal(whole, plain_view(some_images(3, 32)))


def test_crop_of_the_whole_image_is_exact_and_flip_mirrors() -> None:
    x = to_float(some_images(2, 96))
    whole, zero = torch.full((2,), 96.0), torch.zeros(2)
    view = resized_crop(x, zero, zero, whole, whole, torch.tensor([0.0, 1.0]))
    assert torch.equal(view[0], x[0])
    assert torch.equal(view[1], x[1].flip(-1))


def test_resized_crop_sees_nothing_beyond_its_box() -> None:
    x = torch.ones(1, 3, 32, 32)
    x[:, :, 8:20, 5:12] = 0.25
    view = resized_crop(x, *(torch.tensor([v]) for v in (8.0, 5.0, 12.0, 7.0, 1.0)))
    torch.testing.assert_close(view, torch.full_like(view, 0.25))


FACTORS = torch.tensor([0.0, 0.2, 0.6, 1.0, 1.4, 1.8])


@pytest.mark.parametrize(
    ("operation", "enhance"),
    [
        (adjust_brightness, ImageEnhance.Brightness),
        (adjust_contrast, ImageEnhance.Contrast),
        (adjust_saturation, ImageEnhance.Color),
    ],
)
def test_colour_adjustments_match_pillow_up_to_its_rounding(operation, enhance) -> None:
    images = some_images(len(FACTORS))
    views = operation(to_float(images), FACTORS)
    for image, factor, view in zip(images, FACTORS.tolist(), views, strict=True):
        expected = from_pil(enhance(to_pil(image)).enhance(factor))
        # Pillow rounds its gray by up to half a byte, scaled by |1 − factor|, and the result by up to one.
        assert (view - expected).abs().max() <= (1.1 + 0.5 * abs(1 - factor)) * BYTE


@pytest.mark.parametrize(
    ("operation", "reference"),
    [
        (adjust_brightness, kornia.enhance.adjust_brightness_accumulative),
        (adjust_contrast, kornia.enhance.adjust_contrast_with_mean_subtraction),
        (adjust_saturation, kornia.enhance.adjust_saturation_with_gray_subtraction),
        (adjust_hue, lambda x, shift: kornia.enhance.adjust_hue(x, 2 * math.pi * shift)),
    ],
)
def test_colour_adjustments_match_kornia(operation, reference) -> None:
    x = to_float(some_images(len(FACTORS)))
    parameter = FACTORS if operation is not adjust_hue else (FACTORS - 0.9) / 2
    # kornia rounds the luma weights differently: 0.299 for 0.2989.
    torch.testing.assert_close(operation(x, parameter), reference(x, parameter), atol=2e-4, rtol=0)


def test_contrast_and_saturation_match_a_loop_over_pixels() -> None:
    x = to_float(some_images(2, 8))
    factor = torch.tensor([0.3, 1.7])
    weights = np.array([0.2989, 0.587, 0.114])
    for image, f, contrasted, saturated in zip(
        x, factor.tolist(), adjust_contrast(x, factor), adjust_saturation(x, factor), strict=True
    ):
        pixels = image.permute(1, 2, 0).double().numpy()
        gray = pixels @ weights
        by_contrast = np.clip(f * pixels + (1 - f) * gray.mean(), 0, 1)
        by_saturation = np.clip(f * pixels + (1 - f) * gray[..., None], 0, 1)
        np.testing.assert_allclose(contrasted.permute(1, 2, 0).numpy(), by_contrast, atol=1e-6)
        np.testing.assert_allclose(saturated.permute(1, 2, 0).numpy(), by_saturation, atol=1e-6)


@pytest.mark.parametrize("shift", [-0.5, -0.37, -0.1, 0.0, 0.05, 1 / 3, 0.5])
def test_hue_matches_colorsys(shift: float) -> None:
    levels = torch.tensor([0.0, 0.25, 0.6, 1.0])
    colours = torch.cartesian_prod(levels, levels, levels)  # ties, grays, black and white included
    x = colours.T.reshape(1, 3, 8, 8)
    view = adjust_hue(x, torch.tensor([shift])).reshape(3, 64).T
    for colour, turned in zip(colours.tolist(), view.tolist(), strict=True):
        hue, saturation, value = colorsys.rgb_to_hsv(*colour)
        expected = colorsys.hsv_to_rgb((hue + shift) % 1, saturation, value)
        assert turned == pytest.approx(expected, abs=2e-6)


def test_grayscale_is_saturation_zero() -> None:
    images = some_images(3)
    view = apply(to_float(images), ViewParameters(colour=torch.tensor([0.0, 1.0, 0.0])))
    assert torch.equal(view[1], to_float(images)[1])
    for i in (0, 2):
        gray = torch.from_numpy(np.asarray(to_pil(images[i]).convert("L")).copy()) / 255
        assert (view[i] - gray).abs().max() <= 0.7 * BYTE


def test_blur_matches_a_loop_and_kornia_away_from_the_border() -> None:
    x = to_float(some_images(3))
    sigma = torch.tensor([0.1, 0.8, 2.0])
    view = gaussian_blur(x, sigma)
    radius = 12
    middle = (..., slice(radius, -radius), slice(radius, -radius))
    expected = kornia.filters.gaussian_blur2d(x, (2 * radius + 1,) * 2, sigma[:, None].expand(-1, 2))
    torch.testing.assert_close(view[middle], expected[middle], atol=1e-5, rtol=0)
    for row, column in ((0, 0), (31, 4), (10, 20)):
        dy, dx = np.arange(32)[:, None] - row, np.arange(32)[None] - column
        for b in range(3):
            weights = np.exp(-(dy**2 + dx**2) / (2 * sigma[b].item() ** 2))
            mean = (x[b].numpy() * weights).sum((1, 2)) / weights.sum()
            np.testing.assert_allclose(view[b, :, row, column].numpy(), mean, atol=1e-6)


def test_solarize_matches_pillow() -> None:
    images = some_images(4)
    images[:, 0] = torch.arange(1024).reshape(32, 32) % 256  # every byte occurs
    where = torch.tensor([1.0, 0.0, 1.0, 0.0])
    views = solarize(to_float(images), where)
    for image, chosen, view in zip(images, where.tolist(), views, strict=True):
        expected = from_pil(ImageOps.solarize(to_pil(image), 128)) if chosen else to_float(image)
        torch.testing.assert_close(view, expected, atol=1e-6, rtol=0)


def test_neutral_parameters_change_nothing() -> None:
    x = to_float(some_images(2))
    one, zero, whole = torch.ones(2), torch.zeros(2), torch.full((2,), 32.0)
    box = Box(zero, zero, whole, whole, zero)
    neutral = ViewParameters(box, one, one, one, zero, one, torch.full((2,), NO_BLUR), zero)
    torch.testing.assert_close(apply(x, neutral), x, atol=1e-6, rtol=0)


def test_apply_goes_through_the_operations_in_order() -> None:
    x = to_float(some_images(5, 24))
    p = draw(replace(EVERYTHING, jitter=1.0, blur=1.0, solarize=1.0, grayscale=0.5), 5, 24, seeded(3))
    expected = resized_crop(x, *p.box)
    expected = adjust_contrast(adjust_brightness(expected, p.brightness), p.contrast)
    expected = adjust_hue(adjust_saturation(expected, p.saturation), p.hue)
    expected = solarize(gaussian_blur(adjust_saturation(expected, p.colour), p.blur), p.solarize)
    assert torch.equal(apply(x, p), expected)


# ------------------------------------------------------------------------------------ drawn parameters


def share(happens: Tensor) -> float:
    return happens.float().mean().item()


def test_operations_happen_with_their_probability_and_in_their_range() -> None:
    p = draw(EVERYTHING, 20_000, 32, seeded())
    near = {"abs": 0.015}  # more than four standard errors
    assert share(p.box.flip == 1) == pytest.approx(0.5, **near)
    assert share(p.colour == 0) == pytest.approx(0.2, **near)
    assert share(p.blur != NO_BLUR) == pytest.approx(0.5, **near)
    assert share(p.solarize == 1) == pytest.approx(0.2, **near)
    jittered = p.hue != 0
    assert share(jittered) == pytest.approx(0.8, **near)
    for factor in (p.brightness, p.contrast, p.saturation):
        assert torch.equal(factor != 1, jittered)  # one chance for all four
        chosen = factor[jittered]
        assert 0.6 <= chosen.min() < 0.605
        assert 1.395 < chosen.max() <= 1.4
        assert chosen.mean().item() == pytest.approx(1, **near)
    assert -0.1 <= p.hue.min() < -0.099
    assert 0.099 < p.hue.max() <= 0.1
    sigma = p.blur[p.blur != NO_BLUR]
    assert 0.1 <= sigma.min() < 0.11
    assert 1.99 < sigma.max() <= 2.0
    pairs = torch.stack([p.brightness, p.contrast, p.saturation, p.hue])[:, jittered]
    assert (torch.corrcoef(pairs) - torch.eye(4)).abs().max() < 0.04


def test_strong_jitter_never_draws_negative_factors() -> None:
    factor = draw(Recipe(jitter=1.0, brightness=1.5), 5_000, 32, seeded()).brightness
    assert 0 <= factor.min() < 0.01
    assert 2.49 < factor.max() <= 2.5


def torchvision_box(rng: random.Random, size: int, scale: tuple[float, float]) -> tuple[int, int, int, int]:
    """RandomResizedCrop.get_params for a square image, one image at a time."""
    for _ in range(10):
        area = size * size * rng.uniform(*scale)
        aspect = math.exp(rng.uniform(math.log(3 / 4), math.log(4 / 3)))
        width, height = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < width <= size and 0 < height <= size:
            return rng.randint(0, size - height), rng.randint(0, size - width), height, width
    return 0, 0, size, size


@pytest.mark.parametrize("size", [32, 96])
@pytest.mark.parametrize("scale", [(0.08, 1.0), (0.97, 1.0)])  # the second often falls back
def test_boxes_are_distributed_as_torchvisions(size: int, scale: tuple[float, float]) -> None:
    count = 12_000
    box = draw(Recipe(crop_scale=scale), count, size, seeded(1)).box
    ours = torch.stack(box[:4]).T.double().numpy()
    rng = random.Random(2)
    theirs = np.array([torchvision_box(rng, size, scale) for _ in range(count)], dtype=float)
    assert (ours == ours.round()).all()
    assert (ours[:, :2] >= 0).all()
    assert (ours[:, 2:] >= 1).all()
    assert (ours[:, :2] + ours[:, 2:] <= size).all()
    for column in range(4):
        levels = np.arange(size + 1)
        difference = [np.mean(ours[:, column] <= v) - np.mean(theirs[:, column] <= v) for v in levels]
        # Two-sample Kolmogorov–Smirnov: 1.95 √(2/n) is exceeded once in a thousand.
        assert np.abs(difference).max() < 1.95 * math.sqrt(2 / count)
    whole = (ours[:, 2:] == size).all(1).mean(), (theirs[:, 2:] == size).all(1).mean()
    assert whole[0] == pytest.approx(whole[1], abs=0.02)


def test_box_areas_and_aspects_stay_in_range() -> None:
    box = draw(Recipe(crop_scale=(0.2, 0.6)), 10_000, 256, seeded()).box
    area, aspect = box.height * box.width / 256**2, box.width / box.height
    # Sides are rounded to whole pixels: up to 1 % of the smallest side.
    assert 0.198 < area.min() < 0.21
    assert 0.59 < area.max() < 0.606
    assert 0.74 < aspect.min() < 0.76
    assert 1.32 < aspect.max() < 1.35
    assert aspect.log().mean().abs() < 0.01


def test_a_box_that_never_fits_becomes_the_whole_image() -> None:
    box = draw(Recipe(crop_scale=(1.0, 1.0), flip=0.5), 500, 32, seeded()).box
    assert (box.height == 32).all()
    assert (box.width == 32).all()
    assert (box.top == 0).all()
    assert (box.left == 0).all()


def test_unused_operations_are_not_drawn_and_leave_the_others_alone() -> None:
    assert draw(Recipe(), 4, 32, seeded()) == ViewParameters()
    full = draw(EVERYTHING, 8, 32, seeded())
    part = draw(replace(EVERYTHING, flip=0.0, hue=0.0, blur=0.0), 8, 32, seeded())
    assert part.hue is None
    assert part.blur is None
    for name in ("brightness", "contrast", "saturation", "colour", "solarize"):
        assert torch.equal(getattr(part, name), getattr(full, name))
    assert torch.equal(part.box.top, full.box.top)
    assert not part.box.flip.any()


# ----------------------------------------------------------------------------------------- whole views


@pytest.mark.parametrize("name", [*RECIPES, "everything"])
@pytest.mark.parametrize(("batch", "size"), [(6, 32), (1, 32), (2, 96), (0, 32)])
def test_views_are_finite_floats_in_range(name: str, batch: int, size: int) -> None:
    images = some_images(batch, size)
    recipes = RECIPES.get(name, (EVERYTHING, EVERYTHING))
    for view in two_views(images, recipes, seeded()):
        assert view.shape == images.shape
        assert view.dtype == torch.float32
        assert view.isfinite().all()
        assert ((view >= -2 - 1e-5) & (view <= 2 + 1e-5)).all()


@pytest.mark.parametrize("byte", [0, 1, 128, 255])
def test_uniform_images_give_no_nan(byte: int) -> None:
    images = torch.full((16, 3, 32, 32), byte, dtype=torch.uint8)
    strong = replace(EVERYTHING, jitter=1.0, blur=1.0, hue=0.5, brightness=1.0, contrast=1.0)
    view = random_view(images, strong, seeded())
    assert view.isfinite().all()
    assert (view.amax((1, 2, 3)) - view.amin((1, 2, 3))).max() < 0.01  # gray in, one gray out


def test_the_generator_decides_everything() -> None:
    images = some_images()
    state, python_state = torch.get_rng_state(), random.getstate()
    first, second = two_views(images, (EVERYTHING, EVERYTHING), seeded(5))
    again, _ = two_views(images, (EVERYTHING, EVERYTHING), seeded(5))
    other, _ = two_views(images, (EVERYTHING, EVERYTHING), seeded(6))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert not torch.equal(first, second)
    assert torch.equal(torch.get_rng_state(), state)
    assert random.getstate() == python_state


def test_a_view_depends_on_its_own_image_only() -> None:
    images, others = some_images(6, seed=0), some_images(6, seed=1)
    others[2] = images[2]
    view, changed = (random_view(batch, EVERYTHING, seeded()) for batch in (images, others))
    assert torch.equal(view[2], changed[2])
    assert not torch.equal(view[3], changed[3])


def test_copies_of_an_image_get_different_views() -> None:
    images = some_images(1).expand(20, -1, -1, -1)  # not contiguous either
    view = random_view(images, RECIPES["simclr"][0], seeded())
    distances = torch.cdist(view.flatten(1), view.flatten(1)) + 1e3 * torch.eye(20)
    assert distances.min() > 0.1
    parameters = draw(EVERYTHING, 1_000, 32, seeded())
    for field in ("brightness", "contrast", "saturation", "hue"):
        assert getattr(parameters, field).unique().numel() > 700


def test_inputs_are_left_alone() -> None:
    images = some_images()
    copy = images.clone()
    two_views(images, (EVERYTHING, EVERYTHING), seeded())
    assert torch.equal(images, copy)
    x = to_float(images)
    kept = x.clone()
    apply(x, draw(EVERYTHING, len(x), 32, seeded()))
    normalize(x)
    to_float(x)
    assert torch.equal(x, kept)


def test_plain_view_is_normalised_and_none_is_plain() -> None:
    images = some_images()
    expected = (images.double() / 255 - 0.5) / 0.25
    torch.testing.assert_close(plain_view(images), expected.float())
    assert torch.equal(random_view(images, RECIPES["none"][0], seeded()), plain_view(images))


def test_autocast_does_not_coarsen_views() -> None:
    images = some_images()
    expected = random_view(images, EVERYTHING, seeded())
    with torch.autocast("cpu", torch.bfloat16):
        view = random_view(images, EVERYTHING, seeded())
    assert torch.equal(view, expected)


class NoHostSync(TorchDispatchMode):
    """Fails on operations whose result the host must wait for, or whose shape depends on data."""

    forbidden = ("_local_scalar_dense", "nonzero", "masked_select", "_unique", "is_nonzero", "equal")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name.startswith(self.forbidden):
            raise RuntimeError(f"{func} makes the host wait")
        if name in ("index", "index_put_") and any(i is not None and i.dtype == torch.bool for i in args[1]):
            raise RuntimeError(f"{func} with a mask has a shape that depends on data")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "waits",
    [lambda x: x.sum().item(), lambda x: x[x > 0], torch.nonzero, lambda x: bool(x.any())],
)
def test_no_host_sync_notices(waits) -> None:
    with NoHostSync(), pytest.raises(RuntimeError, match=r"host wait|depends on data"):
        waits(torch.ones(3))


@pytest.mark.parametrize("recipes", [*RECIPES.values(), (EVERYTHING, EVERYTHING)])
def test_views_never_wait_for_the_device(recipes: tuple[Recipe, Recipe]) -> None:
    images, generator = some_images(), seeded()
    with NoHostSync():
        two_views(images, recipes, generator)


@pytest.mark.parametrize(
    "images",
    [
        torch.zeros(2, 3, 32, 32),
        torch.zeros(2, 1, 32, 32, dtype=torch.uint8),
        torch.zeros(3, 32, 32, dtype=torch.uint8),
        torch.zeros(2, 3, 32, 16, dtype=torch.uint8),
    ],
)
def test_wrong_images_are_refused(images: Tensor) -> None:
    with pytest.raises(DataError, match="uint8"):
        random_view(images, Recipe(), seeded())
    with pytest.raises(DataError, match="uint8"):
        plain_view(images)


# --------------------------------------------------------------------------------------------- recipes


def test_options_have_a_recipe_field_each() -> None:
    known = {field.name for field in fields(Recipe)}
    assert set(ViewOptions.model_fields) - {"recipe"} <= known


@pytest.mark.parametrize("name", ["simclr", "byol", "simsiam"])
def test_auto_takes_the_recipe_of_the_objective(name: str) -> None:
    assert views_for(ViewOptions(), name) == RECIPES[name]
    assert views_for(ViewOptions(recipe="weak"), name) == RECIPES["weak"]


def test_an_unknown_objective_gets_simclrs_views() -> None:
    assert views_for(ViewOptions(), "my_own") == RECIPES["simclr"]


def test_only_byols_second_view_is_solarised() -> None:
    first, second = RECIPES["byol"]
    assert (first.solarize, second.solarize) == (0, 0.2)
    assert replace(second, solarize=0) == first


def test_options_override_fields_of_both_views_but_solarize_of_the_second() -> None:
    options = ViewOptions(recipe="simclr", crop_scale=(0.5, 0.9), flip=0.0, hue=0.2, blur=0.3, solarize=0.4)
    first, second = views_for(options, "byol")
    expected = replace(RECIPES["simclr"][0], crop_scale=(0.5, 0.9), flip=0.0, hue=0.2, blur=0.3)
    assert first == expected
    assert second == replace(expected, solarize=0.4)


@pytest.mark.parametrize("scale", [(0.0, 1.0), (-0.1, 0.5), (0.6, 0.5), (0.5, 1.1)])
def test_impossible_crop_scales_are_refused(scale: tuple[float, float]) -> None:
    with pytest.raises(UsageError, match="crop_scale"):
        views_for(ViewOptions(crop_scale=scale), "simclr")


def test_impossible_blur_widths_are_refused() -> None:
    with pytest.raises(UsageError, match="blur_sigma"):
        Recipe(blur_sigma=(0.0, 1.0))
