"""How fast are two random views of a batch? fedu2 beside kornia and a per-image Pillow loop, on one thread.

    python -m benchmarks.views [--batch 128] [--size 32] [--repeats 15] [--recipe simclr]

The three take turns in one process, so that a busy machine slows all of them alike: compare the ratios.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import time
from collections.abc import Callable

import kornia.augmentation as K
import numpy as np
import torch
from PIL import Image, ImageEnhance, ImageOps
from torch import Tensor, nn

from fedu2.views import MEAN, RECIPES, STD, Recipe, normalize, to_float, two_views


def kornia_pipeline(recipe: Recipe, size: int) -> nn.Module:
    """The same operations with kornia; like fedu2's, per-sample parameters over a batch."""
    strengths = (recipe.brightness, recipe.contrast, recipe.saturation, recipe.hue)
    operations = [
        K.RandomResizedCrop((size, size), scale=recipe.crop_scale),
        K.RandomHorizontalFlip(p=recipe.flip),
        K.ColorJitter(*strengths, p=recipe.jitter),
        K.RandomGrayscale(p=recipe.grayscale),
        K.RandomSolarize(thresholds=0.5, additions=0.0, p=recipe.solarize),
    ]
    used = [operation for operation in operations if operation.p > 0]
    return nn.Sequential(*used, K.Normalize(mean=torch.full((3,), MEAN), std=torch.full((3,), STD)))


def pillow_view(image: Image.Image, recipe: Recipe, rng: random.Random) -> Image.Image:
    """The same operations on one image, as torchvision carries them out on Pillow images."""
    size = image.width
    area = size * size * rng.uniform(*recipe.crop_scale)
    aspect = math.exp(rng.uniform(math.log(3 / 4), math.log(4 / 3)))
    width, height = (min(size, round(math.sqrt(area * a))) for a in (aspect, 1 / aspect))
    left, top = rng.randint(0, size - width), rng.randint(0, size - height)
    box = (left, top, left + width, top + height)
    view = image.crop(box).resize((size, size), Image.Resampling.BILINEAR)
    if rng.random() < recipe.flip:
        view = ImageOps.mirror(view)
    if rng.random() < recipe.jitter:
        for enhance, strength in (
            (ImageEnhance.Brightness, recipe.brightness),
            (ImageEnhance.Contrast, recipe.contrast),
            (ImageEnhance.Color, recipe.saturation),
        ):
            view = enhance(view).enhance(rng.uniform(1 - strength, 1 + strength))
        view = pillow_hue(view, rng.uniform(-recipe.hue, recipe.hue))
    if rng.random() < recipe.grayscale:
        view = view.convert("L").convert("RGB")
    if rng.random() < recipe.solarize:
        view = ImageOps.solarize(view)
    return view


def pillow_hue(image: Image.Image, shift: float) -> Image.Image:
    hue, saturation, value = image.convert("HSV").split()
    turned = Image.fromarray((np.asarray(hue) + np.uint8(round(255 * shift) % 256)).astype(np.uint8))
    return Image.merge("HSV", (turned, saturation, value)).convert("RGB")


def pillow_views(images: list[Image.Image], recipe: Recipe, rng: random.Random) -> Tensor:
    views = np.stack([np.asarray(pillow_view(image, recipe, rng)) for image in images])
    return normalize(to_float(torch.from_numpy(views).permute(0, 3, 1, 2)))


def take_turns(contenders: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Median seconds of each contender, measured in turns after one untimed call."""
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(repeats + 1):
        for name, contender in contenders.items():
            start = time.perf_counter()
            contender()
            if turn > 0:
                seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--size", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--recipe", choices=["simclr", "byol", "simsiam"], default="simclr")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    # A training process frees large blocks, after which glibc keeps memory instead of returning it to the
    # system; without this line every temporary of a batch would cost page faults.
    torch.empty(31 * 2**20, dtype=torch.uint8).fill_(1)

    recipes = RECIPES[arguments.recipe]
    images = torch.randint(0, 256, (arguments.batch, 3, arguments.size, arguments.size), dtype=torch.uint8)
    pictures = [Image.fromarray(image.permute(1, 2, 0).numpy()) for image in images]
    generator, rng = torch.Generator().manual_seed(0), random.Random(0)
    pipelines = [kornia_pipeline(recipe, arguments.size) for recipe in recipes]

    medians = take_turns(
        {
            "fedu2": lambda: two_views(images, recipes, generator),
            "kornia": lambda: [pipeline(to_float(images)) for pipeline in pipelines],
            "pillow loop": lambda: [pillow_views(pictures, recipe, rng) for recipe in recipes],
        },
        arguments.repeats,
    )
    print(f"two {arguments.recipe} views of {arguments.batch} images of {arguments.size} pixels, one thread")
    for name, median in medians.items():
        rate, ratio = arguments.batch / median, median / medians["fedu2"]
        print(f"{name:12s} {1e3 * median:8.1f} ms {rate:10.0f} images/s   {ratio:5.1f} × the time of fedu2")


if __name__ == "__main__":
    main()
