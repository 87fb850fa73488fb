"""Two random views of a batch as one GPU kernel: one program an image and view, from bytes to the encoder's input.

A program draws the parameters of its view from uniform numbers, as `parameters` does, and takes the image through the
steps of `operations`, all of it in registers. Formulas and their order are the same, so that both ways make the same
views up to rounding. Boxes come out equal as the precise square root, division and exponential are taken and no
product is fused with a sum, which the launch forbids; all that follows is continuous in the pixels.

Imported where Triton is; see `fedu2.views.training_views`.
"""

# Triton's language has no types, and Triton itself may be missing.
# mypy: disable-error-code="import-not-found,import-untyped,no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from fedu2 import kernels
from fedu2.views import MEAN, STD
from fedu2.views.parameters import ASPECT, ATTEMPTS, row_of
from fedu2.views.recipes import Recipe

__all__ = ["LARGEST", "fused_views", "supported"]

LARGEST = 64 * 64  # pixels of a view: more do not fit into the registers of one program

INTERPRETED = tl.constexpr(kernels.INTERPRETED)
BOXES = tl.constexpr(ATTEMPTS)
FLATTEST, STEEPEST = tl.constexpr(math.log(ASPECT[0])), tl.constexpr(math.log(ASPECT[1]))
MIDDLE, SPREAD = tl.constexpr(MEAN), tl.constexpr(STD)
WHOLE = tl.constexpr(1.5 * 2**23)  # floats near it are whole numbers: adding it rounds, halves to even

# Rows of `uniforms`
TOP, LEFT, FLIP, GRAY, INVERT = (tl.constexpr(row_of(name)) for name in ("top", "left", "flip", "gray", "invert"))
JITTER, BRIGHTNESS, CONTRAST, SATURATION, HUE = (
    tl.constexpr(row_of(name)) for name in ("jitter", "brightness", "contrast", "saturation", "hue")
)


@triton.jit(do_not_specialize=["indices_at", "batch"])
def views_kernel(
    images_at,  # (n, 3, S, S) bytes
    indices_at,  # (B,)
    first_at,  # (ROWS, B) uniform numbers, see `parameters.uniforms`
    second_at,
    views_at,  # (2, B, T, T, 3)
    batch,
    FIRST: tl.constexpr,  # recipes
    SECOND: tl.constexpr,
    SIZE: tl.constexpr,  # S
    SIDE: tl.constexpr,  # T
    PIXELS: tl.constexpr,  # T² as a power of two
):
    place, second = tl.program_id(0), tl.program_id(1)
    image_at = images_at + tl.load(indices_at + place).to(tl.int64) * (3 * SIZE * SIZE)
    view_at = views_at + (second * batch + place).to(tl.int64) * (3 * SIDE * SIDE)
    uniform_at = second_at + place if second else first_at + place
    if FIRST == SECOND:
        make_view(image_at, uniform_at, view_at, batch, FIRST, SIZE, SIDE, PIXELS)
    elif second:
        make_view(image_at, uniform_at, view_at, batch, SECOND, SIZE, SIDE, PIXELS)
    else:
        make_view(image_at, uniform_at, view_at, batch, FIRST, SIZE, SIDE, PIXELS)


@triton.jit
def make_view(
    image_at,
    uniform_at,
    view_at,
    batch,
    RECIPE: tl.constexpr,
    SIZE: tl.constexpr,
    SIDE: tl.constexpr,
    PIXELS: tl.constexpr,
):
    """`operations.apply`, and `normalize`."""
    pixel = tl.arange(0, PIXELS)
    inside = pixel < SIDE * SIDE
    # Loaded before anything is waited for.
    invert, gray = tl.load(uniform_at + INVERT * batch), tl.load(uniform_at + GRAY * batch)
    jittered = tl.load(uniform_at + JITTER * batch) < RECIPE.jitter
    brightness = draw(tl.load(uniform_at + BRIGHTNESS * batch), RECIPE.brightness, 1.0, jittered)
    contrast = draw(tl.load(uniform_at + CONTRAST * batch), RECIPE.contrast, 1.0, jittered)
    saturation = draw(tl.load(uniform_at + SATURATION * batch), RECIPE.saturation, 1.0, jittered)
    shift = draw(tl.load(uniform_at + HUE * batch), RECIPE.hue, 0.0, jittered)

    if RECIPE.crop_scale[0] < 1 or RECIPE.flip > 0 or SIDE != SIZE:
        red, green, blue = resized_crop(image_at, uniform_at, batch, pixel, inside, RECIPE, SIZE, SIDE)
    else:
        red, green, blue = load_pixel(image_at, pixel, inside, SIZE)
    if RECIPE.jitter > 0:
        if RECIPE.brightness > 0:
            red, green, blue = clamp(red * brightness), clamp(green * brightness), clamp(blue * brightness)
        if RECIPE.contrast > 0:
            mean = divide(tl.sum(tl.where(inside, luma(red, green, blue), 0.0), 0), SIDE * SIDE)
            red, green, blue = blend(mean, red, green, blue, contrast)
        if RECIPE.saturation > 0:
            red, green, blue = blend(luma(red, green, blue), red, green, blue, saturation)
        if RECIPE.hue > 0:
            red, green, blue = adjust_hue(red, green, blue, shift)
    if RECIPE.grayscale > 0:
        shade, kept = luma(red, green, blue), gray >= RECIPE.grayscale
        red, green, blue = tl.where(kept, red, shade), tl.where(kept, green, shade), tl.where(kept, blue, shade)
    if RECIPE.solarize > 0:
        top = tl.where(invert < RECIPE.solarize, 1.0, 2.0)
        red, green, blue = tl.minimum(red, top - red), tl.minimum(green, top - green), tl.minimum(blue, top - blue)

    view_at += 3 * pixel
    tl.store(view_at, normalize(red).to(view_at.dtype.element_ty), mask=inside)
    tl.store(view_at + 1, normalize(green).to(view_at.dtype.element_ty), mask=inside)
    tl.store(view_at + 2, normalize(blue).to(view_at.dtype.element_ty), mask=inside)


@triton.jit
def draw(uniform, strength, neutral, jittered):
    """A factor (neutral 1) or a shift (neutral 0) within `strength` of neutral; factors are not negative."""
    low = 0.0 if neutral - strength < 0 and neutral > 0 else neutral - strength
    return tl.where(jittered, between(uniform, low, neutral + strength), neutral)


@triton.jit
def between(uniform, low, high):
    return low + (high - low) * uniform


@triton.jit
def resized_crop(
    image_at, uniform_at, batch, pixel, inside, RECIPE: tl.constexpr, SIZE: tl.constexpr, SIDE: tl.constexpr
):
    """The first of ATTEMPTS boxes that fits into the image, else the whole, stretched to T × T, perhaps mirrored."""
    attempt = tl.arange(0, 16)
    drawn = attempt < BOXES
    areas = tl.load(uniform_at + attempt * batch, mask=drawn, other=0.5)
    aspects = tl.load(uniform_at + (BOXES + attempt) * batch, mask=drawn, other=0.5)
    top, left = tl.load(uniform_at + TOP * batch), tl.load(uniform_at + LEFT * batch)
    flip = tl.load(uniform_at + FLIP * batch) < RECIPE.flip

    area = between(areas, RECIPE.crop_scale[0], RECIPE.crop_scale[1]) * (SIZE * SIZE)
    aspect = exp(between(aspects, FLATTEST, STEEPEST))
    # Attempts from the BOXESth on hold the whole image: it always fits.
    width = tl.where(drawn, round_to_even(tl.sqrt_rn(area * aspect)), SIZE)
    height = tl.where(drawn, round_to_even(tl.sqrt_rn(tl.div_rn(area, aspect))), SIZE)
    fits = (tl.minimum(width, height) >= 1) & (tl.maximum(width, height) <= SIZE)
    chosen = attempt == tl.min(tl.where(fits, attempt, BOXES), 0)
    width = tl.sum(tl.where(chosen, width, 0.0), 0)
    height = tl.sum(tl.where(chosen, height, 0.0), 0)
    top, left = tl.floor(top * (SIZE - height + 1)), tl.floor(left * (SIZE - width + 1))

    row, column = pixel // SIDE, pixel % SIDE
    upper, lower, down = interpolation(row, top, height, SIZE, SIDE)
    near, far, across = interpolation(tl.where(flip, SIDE - 1 - column, column), left, width, SIZE, SIDE)
    red00, green00, blue00 = load_pixel(image_at, upper * SIZE + near, inside, SIZE)
    red01, green01, blue01 = load_pixel(image_at, upper * SIZE + far, inside, SIZE)
    red10, green10, blue10 = load_pixel(image_at, lower * SIZE + near, inside, SIZE)
    red11, green11, blue11 = load_pixel(image_at, lower * SIZE + far, inside, SIZE)
    red = mix(mix(red00, red01, across), mix(red10, red11, across), down)
    green = mix(mix(green00, green01, across), mix(green10, green11, across), down)
    blue = mix(mix(blue00, blue01, across), mix(blue10, blue11, across), down)
    return red, green, blue


@triton.jit
def interpolation(pixel, start, length, SIZE: tl.constexpr, SIDE: tl.constexpr):
    """The two input pixels between which an output pixel lies, and the second's weight: `operations._interpolation`."""
    step = divide(length, SIDE)
    centre = start + tl.minimum(tl.maximum((pixel.to(tl.float32) + 0.5) * step - 0.5, 0.0), length - 1)
    before = tl.floor(centre)
    first = before.to(tl.int32)
    return first, tl.minimum(first + 1, SIZE - 1), centre - before  # beyond the last pixel, the weight is 0


@triton.jit
def load_pixel(image_at, pixel, inside, SIZE: tl.constexpr):
    """Red, green and blue in [0, 1]."""
    red = tl.load(image_at + pixel, mask=inside, other=0)
    green = tl.load(image_at + SIZE * SIZE + pixel, mask=inside, other=0)
    blue = tl.load(image_at + 2 * SIZE * SIZE + pixel, mask=inside, other=0)
    return divide(red.to(tl.float32), 255), divide(green.to(tl.float32), 255), divide(blue.to(tl.float32), 255)


@triton.jit
def blend(other, red, green, blue, factor):
    """factor · x + (1 − factor) · other, clamped; rounded as torch.lerp does."""
    return lerp(other, red, factor), lerp(other, green, factor), lerp(other, blue, factor)


@triton.jit
def lerp(start, end, weight):
    rise = end - start
    return clamp(tl.where(weight < 0.5, start + weight * rise, end - rise * (1 - weight)))


@triton.jit
def adjust_hue(red, green, blue, shift):
    """`operations.adjust_hue`."""
    value = tl.maximum(red, tl.maximum(green, blue))
    chroma = value - tl.minimum(red, tl.minimum(green, blue))
    unless_red = tl.where(green == value, blue - red + 2 * chroma, red - green + 4 * chroma)
    scaled = tl.where(red == value, green - blue, unless_red)
    hue = scaled / tl.maximum(chroma, 1e-12) + 6 * shift
    hue -= 6 * tl.floor(hue * (1 / 6))
    return channel(hue, value, chroma, 0), channel(hue, value, chroma, 2), channel(hue, value, chroma, 4)


@triton.jit
def channel(hue, value, chroma, own_hue):
    """V − C · clamp(d − 1, 0, 1) with the distance d from the hue to the channel's own."""
    beyond = tl.abs(tl.abs(hue - own_hue) - 3) - 2
    return value + chroma * tl.minimum(tl.maximum(beyond, -1.0), 0.0)


@triton.jit
def luma(red, green, blue):
    return 0.2989 * red + 0.587 * green + 0.114 * blue


@triton.jit
def mix(first, second, weight):
    return (1 - weight) * first + weight * second


@triton.jit
def clamp(x):
    return tl.minimum(tl.maximum(x, 0.0), 1.0)


@triton.jit
def normalize(x):
    return divide(x - MIDDLE, SPREAD)


@triton.jit
def round_to_even(x):
    return (x + WHOLE) - WHOLE


@triton.jit
def divide(x, number):
    """Division of a tensor by a number as torch rounds it: on GPUs it multiplies by the reciprocal."""
    if INTERPRETED:
        return x / number
    else:
        return x * (1.0 / number)


@triton.jit
def exp(x):
    if INTERPRETED:
        return tl.exp(x)
    else:
        return libdevice.exp(x)


def supported(images: Tensor, recipes: tuple[Recipe, Recipe]) -> bool:
    """Whether `fused_views` can make these views."""
    reachable = images.is_cuda or kernels.INTERPRETED
    sides = {recipe.size or images.shape[-1] for recipe in recipes}
    fits = images.is_contiguous() and len(sides) == 1 and max(sides) ** 2 <= LARGEST
    return reachable and fits and not any(recipe.blur for recipe in recipes)


def fused_views(
    images: Tensor,
    indices: Tensor,
    recipes: tuple[Recipe, Recipe],
    uniforms: tuple[Tensor, Tensor],
    dtype: torch.dtype,
    *,
    warps: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Normalised random views of images[indices]: two tensors (B, 3, T, T), channels last, in `dtype`.

    They are the halves of one tensor (2B, 3, T, T); T is the recipes' size, or S. images: uint8 (n, 3, S, S), see
    `supported`; indices: (B,), not checked; uniforms: of each view, see `parameters.uniforms`.
    """
    batch, size = len(indices), images.shape[-1]
    first, second = (uniform.contiguous() for uniform in uniforms)
    side = recipes[0].size or size
    shape = (2 * batch, 3, side, side)
    views = torch.empty(shape, dtype=dtype, device=images.device, memory_format=torch.channels_last)
    if batch:
        pixels = triton.next_power_of_2(side * side)
        with torch.cuda.device_of(images):
            views_kernel[(batch, 2)](
                images, indices.contiguous(), first, second, views, batch,
                FIRST=recipes[0], SECOND=recipes[1], SIZE=size, SIDE=side, PIXELS=pixels,
                num_warps=warps or min(max(pixels // 128, 4), 16), enable_fp_fusion=False,
            )  # fmt: skip
    return views[:batch], views[batch:]
