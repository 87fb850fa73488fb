"""`training_views`: its portable path against the plain operations, and the fused kernel against the portable path.

Tests of the kernel need Triton and a GPU, or Triton's interpreter: TRITON_INTERPRET=1 in the environment.
"""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from conftest import DEVICE
from fedu2 import kernels, views
from fedu2.errors import DataError
from fedu2.kernels import INTERPRETED
from fedu2.views import RECIPES, Recipe, draw, training_views, two_views, uniforms
from fedu2.views.operations import apply
from fedu2.views.parameters import ATTEMPTS, parameters

needs_kernel = pytest.mark.usefixtures("needs_kernels")
needs_gpu = pytest.mark.usefixtures("needs_kernels", "needs_gpu")

STRONG = Recipe((0.02, 1.0), 0.5, 0.9, 1.5, 1.5, 1.5, 0.5, 0.3, solarize=0.5)
ALMOST_ONE = 1 - 2**-24  # the largest number that torch.rand gives
TOLERANCE = 2e-5  # of normalised views: a hundred and more times finer than a byte


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator(DEVICE).manual_seed(seed)


def noise_images(count: int = 9, size: int = 32, seed: int = 0) -> Tensor:
    """Neighbours have nothing in common: a weight or pixel that is slightly off shows at once."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (count, 3, size, size), dtype=torch.uint8, generator=generator).to(DEVICE)


def some_indices(batch: int, count: int = 9) -> Tensor:
    return torch.randint(0, count, (batch,), generator=torch.Generator().manual_seed(batch)).to(DEVICE)


def numbers(batch: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = seeded(seed)
    return uniforms(batch, generator), uniforms(batch, generator)


def portable(images: Tensor, recipe: Recipe, uniform: Tensor) -> Tensor:
    return views.normalize(apply(views.to_float(images), parameters(recipe, images.shape[-1], uniform)))


def assert_same_views(
    images: Tensor, recipes: tuple[Recipe, Recipe], uniform: tuple[Tensor, Tensor], indices: Tensor | None = None
) -> None:
    from fedu2.views.kernel import fused_views

    indices = torch.arange(len(images), device=DEVICE) if indices is None else indices
    fused = fused_views(images, indices, recipes, uniform, torch.float32)
    for view, recipe, number in zip(fused, recipes, uniform, strict=True):
        side = recipe.size or images.shape[-1]
        assert view.shape == (len(indices), 3, side, side)
        torch.testing.assert_close(view, portable(images[indices], recipe, number), atol=TOLERANCE, rtol=0)


# ------------------------------------------------------------------------------------- the portable path


@pytest.mark.parametrize("name", RECIPES)
def test_portable_views_are_two_views_of_the_batch_with_channels_last(name: str) -> None:
    images, indices = noise_images(), some_indices(5)
    expected = two_views(images[indices], RECIPES[name], seeded(3))
    got = training_views(images, indices, RECIPES[name], seeded(3), fused=False)
    for view, reference in zip(got, expected, strict=True):
        assert torch.equal(view, reference)
        assert view.dtype == torch.float32
        assert view.is_contiguous(memory_format=torch.channels_last)


def test_portable_views_are_rounded_to_the_wanted_type() -> None:
    images, indices = noise_images(), some_indices(4)
    exact = training_views(images, indices, RECIPES["byol"], seeded(), fused=False)
    rounded = training_views(images, indices, RECIPES["byol"], seeded(), fused=False, dtype=torch.bfloat16)
    for view, reference in zip(rounded, exact, strict=True):
        assert torch.equal(view, reference.to(torch.bfloat16))
        assert view.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("recipe", [Recipe(), STRONG, RECIPES["byol"][1]])
def test_drawing_takes_one_block_of_uniform_numbers(recipe: Recipe) -> None:
    drawing, plain = seeded(7), seeded(7)
    drawn = draw(recipe, 6, 32, drawing)
    block = torch.rand((2 * ATTEMPTS + 12, 6), generator=plain, device=DEVICE)
    assert torch.equal(drawing.get_state(), plain.get_state())
    for got, expected in zip(vars(drawn).values(), vars(parameters(recipe, 32, block)).values(), strict=True):
        assert (got is None) == (expected is None)
        if got is not None:
            stack = torch.stack if isinstance(got, tuple) else torch.clone
            assert torch.equal(stack(got), stack(expected))


def test_without_triton_the_portable_path_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, "fedu2.views.kernel", raising=False)
    monkeypatch.delattr(views, "kernel", raising=False)
    kernels.load.cache_clear()
    try:
        images, indices = noise_images(), some_indices(3)
        got = training_views(images, indices, RECIPES["simclr"], seeded(), fused=True)
        assert kernels.load("views") is None
    finally:
        kernels.load.cache_clear()
    for view, expected in zip(got, two_views(images[indices], RECIPES["simclr"], seeded()), strict=True):
        assert torch.equal(view, expected)


@pytest.mark.parametrize("fused", [False, True])
def test_wrong_images_are_refused(fused: bool) -> None:
    with pytest.raises(DataError, match="uint8"):
        training_views(torch.zeros(2, 3, 8, 8), torch.tensor([0]), RECIPES["none"], seeded(), fused=fused)


# -------------------------------------------------------------------------------------------- the kernel


@needs_kernel
@pytest.mark.parametrize(("batch", "size"), [(5, 32), (7, 16), (3, 24), (1, 64), (4, 5)])
@pytest.mark.parametrize("name", [*RECIPES, "strong"])
def test_fused_views_are_the_portable_ones(name: str, batch: int, size: int) -> None:
    recipes = RECIPES.get(name, (STRONG, replace(STRONG, crop_scale=(1.0, 1.0), jitter=1.0)))
    assert_same_views(noise_images(9, size), recipes, numbers(batch, size), some_indices(batch))


@needs_kernel
@pytest.mark.parametrize("side", [24, 32, 40, 7])
@pytest.mark.parametrize("name", [*RECIPES, "strong"])
def test_fused_views_of_another_side_are_the_portable_ones(name: str, side: int) -> None:
    first, second = RECIPES.get(name, (STRONG, replace(STRONG, crop_scale=(1.0, 1.0), jitter=1.0)))
    recipes = (replace(first, size=side), replace(second, size=side))
    assert_same_views(noise_images(9, 32), recipes, numbers(5, side), some_indices(5))
    assert_same_views(noise_images(9, 72), recipes, numbers(5, side), some_indices(5))  # too large but for the views


@needs_kernel
@pytest.mark.parametrize("only", ["flip", "brightness", "contrast", "saturation", "hue", "grayscale", "solarize"])
def test_each_operation_alone(only: str) -> None:
    recipe = replace(Recipe(jitter=1.0), **{only: 0.5})
    assert_same_views(noise_images(6, 8), (recipe, replace(recipe, jitter=0.6)), numbers(6))


@needs_kernel
@pytest.mark.parametrize("value", [0.0, 0.5, ALMOST_ONE])
def test_extreme_numbers(value: float) -> None:
    uniform = torch.full((2 * ATTEMPTS + 12, 2), value, device=DEVICE)
    uniform[2 * ATTEMPTS :, 1] = ALMOST_ONE - uniform[2 * ATTEMPTS :, 1]
    for recipe in (STRONG, replace(STRONG, jitter=1.0, solarize=1.0, grayscale=0.0)):
        assert_same_views(noise_images(2, 16), (recipe, RECIPES["simclr"][0]), (uniform, uniform))


@needs_kernel
@pytest.mark.parametrize("chance", [0.1, 0.5, 0.8])
def test_numbers_that_equal_a_probability(chance: float) -> None:
    uniform = uniforms(2, seeded())
    uniform[2 * ATTEMPTS + 2 : 2 * ATTEMPTS + 8] = chance  # what happens, not how strongly
    recipe = replace(STRONG, flip=chance, jitter=chance, grayscale=chance, solarize=chance)
    assert_same_views(noise_images(2, 16), (recipe, replace(recipe, jitter=1.0)), (uniform, uniform))


@needs_kernel
def test_the_first_box_that_fits_is_taken() -> None:
    """Image k has k boxes that are too wide before those that fit, all of different size; the last has none."""
    uniform = torch.rand((2 * ATTEMPTS + 12, ATTEMPTS + 1), generator=seeded(), device=DEVICE)
    uniform[:ATTEMPTS] = torch.linspace(0.1, 0.5, ATTEMPTS, device=DEVICE)[:, None]
    for image in range(ATTEMPTS + 1):
        uniform[:image, image] = uniform[ATTEMPTS : ATTEMPTS + image, image] = ALMOST_ONE
    recipe = Recipe(crop_scale=(0.08, 1.0))
    box = parameters(recipe, 16, uniform).box
    assert (box.height * box.width).unique().numel() > ATTEMPTS // 2  # the case is what it is meant to be
    assert (box.height[-1], box.width[-1]) == (16, 16)
    assert_same_views(noise_images(ATTEMPTS + 1, 16), (recipe, recipe), (uniform, uniform.flip(0)))


@needs_kernel
def test_sides_are_rounded_with_halves_to_even() -> None:
    """Squares of 2.5², 3.5², 4.5², ... pixels get sides 2, 4, 4, ..."""
    size, sides = 16, torch.arange(2.5, 12.5, device=DEVICE)
    uniform = torch.full((2 * ATTEMPTS + 12, len(sides)), 0.5, device=DEVICE)  # aspect 1: log ¾ + log ⁴⁄₃ = 0
    uniform[:ATTEMPTS] = sides.square() / size**2 * 2 - 1  # area ½ + ½ u of the image, without rounding
    recipe = Recipe(crop_scale=(0.5, 1.0))
    assert parameters(recipe, size, uniform).box.width.tolist() == [2 * round(s / 2) for s in sides.tolist()]
    assert_same_views(noise_images(len(sides), size), (recipe, recipe), (uniform, uniform))


@needs_kernel
@pytest.mark.parametrize("kind", ["black", "white", "gray", "grays", "saturated", "nearly gray"])
def test_images_at_the_edges_of_the_colour_space(kind: str) -> None:
    noise = noise_images(3, 16)
    images = {
        "black": torch.zeros_like(noise),
        "white": torch.full_like(noise, 255),
        "gray": torch.full_like(noise, 128),
        "grays": noise[:, :1].expand_as(noise).contiguous(),
        "saturated": 255 * (noise > 127).to(torch.uint8),
        "nearly gray": 127 + noise % 2,
    }[kind]
    recipe = replace(STRONG, jitter=1.0)
    assert_same_views(images, (recipe, RECIPES["byol"][1]), numbers(3, 1))


@needs_kernel
def test_both_paths_draw_the_same_and_leave_the_generator_alike() -> None:
    images, indices, first, second = noise_images(), some_indices(5), seeded(2), seeded(2)
    for _ in range(2):
        fused = training_views(images, indices, RECIPES["byol"], first, fused=True)
        plain = training_views(images, indices, RECIPES["byol"], second, fused=False)
        assert torch.equal(first.get_state(), second.get_state())
        for view, expected in zip(fused, plain, strict=True):
            torch.testing.assert_close(view, expected, atol=TOLERANCE, rtol=0)


@needs_kernel
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fused_views_are_halves_with_channels_last(dtype: torch.dtype) -> None:
    images, indices = noise_images(), some_indices(3)
    first, second = training_views(images, indices, RECIPES["simclr"], seeded(), fused=True, dtype=dtype)
    assert second.data_ptr() == first.data_ptr() + first.nbytes
    for view in (first, second):
        assert view.dtype == dtype
        assert view.is_contiguous(memory_format=torch.channels_last)


@needs_kernel
def test_bfloat16_views_are_the_rounded_float32_ones() -> None:
    images, indices = noise_images(9, 16), some_indices(3)
    exact = training_views(images, indices, RECIPES["byol"], seeded(), fused=True)
    rounded = training_views(images, indices, RECIPES["byol"], seeded(), fused=True, dtype=torch.bfloat16)
    for view, reference in zip(rounded, exact, strict=True):
        # Triton's interpreter cuts digits off where GPUs round.
        tolerance = 2**-6 if INTERPRETED else 0
        torch.testing.assert_close(view, reference.to(torch.bfloat16), atol=tolerance, rtol=0)


@needs_kernel
def test_no_images_no_views() -> None:
    empty = torch.zeros(0, dtype=torch.int64, device=DEVICE)
    for view in training_views(noise_images(), empty, RECIPES["simclr"], seeded(), fused=True):
        assert view.shape == (0, 3, 32, 32)


@needs_kernel
def test_what_the_kernel_cannot_do_is_done_by_the_portable_path() -> None:
    from fedu2.views.kernel import supported

    simclr, blurred = RECIPES["simclr"], (RECIPES["simclr"][0], replace(RECIPES["simclr"][1], blur=0.5))
    unequal = (simclr[0], replace(simclr[1], size=24))
    images = noise_images(4, 8)
    assert supported(images, simclr)
    for pictures, recipes in (
        (images, blurred),
        (images, unequal),
        (images.mT, simclr),
        (torch.zeros(1, 3, 65, 65, dtype=torch.uint8, device=DEVICE), simclr),
    ):
        assert not supported(pictures, recipes)
        indices = some_indices(3, len(pictures))
        got = training_views(pictures, indices, recipes, seeded(), fused=True)
        for view, expected in zip(got, two_views(pictures[indices], recipes, seeded()), strict=True):
            assert torch.equal(view, expected)


# ----------------------------------------------------------------------------------------- on a GPU only


@needs_gpu
@pytest.mark.parametrize("size", [24, 32, 33, 64])
def test_thousands_of_views_are_the_portable_ones(size: int) -> None:
    """No box of 8192 differs: boxes hang on comparisons, where one rounding would show in the whole view."""
    assert_same_views(noise_images(50, size), (STRONG, RECIPES["byol"][1]), numbers(4096), some_indices(4096, 50))


@needs_gpu
@pytest.mark.parametrize("warps", [1, 2, 4, 8, 16])
def test_any_number_of_warps_gives_the_same(warps: int) -> None:
    from fedu2.views.kernel import fused_views

    images, indices, uniform = noise_images(), some_indices(33), numbers(33)
    expected = fused_views(images, indices, RECIPES["byol"], uniform, torch.float32)
    got = fused_views(images, indices, RECIPES["byol"], uniform, torch.float32, warps=warps)
    for view, reference in zip(got, expected, strict=True):
        torch.testing.assert_close(view, reference, atol=TOLERANCE, rtol=0)


@needs_gpu
def test_a_captured_graph_draws_what_eager_calls_draw() -> None:
    images, indices, generator = noise_images(), some_indices(16), seeded()

    def views_of_batch() -> tuple[Tensor, Tensor]:
        return training_views(images, indices, RECIPES["byol"], generator, fused=True, dtype=torch.bfloat16)

    views_of_batch()  # compiles
    graph = torch.cuda.CUDAGraph()
    graph.register_generator_state(generator)
    with torch.cuda.graph(graph):
        captured = views_of_batch()
    replayed = []
    generator.manual_seed(5)
    for _ in range(2):
        graph.replay()
        replayed.append([view.clone() for view in captured])
    generator.manual_seed(5)
    for pair in replayed:
        for view, expected in zip(pair, views_of_batch(), strict=True):
            assert torch.equal(view, expected)
    assert not torch.equal(replayed[0][0], replayed[1][0])
