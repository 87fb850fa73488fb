"""The sample that comes with the package: 5,000 real CIFAR-10 images, for runs without a download.

See `sample/README.md` for their origin. A sheet is one lossless WebP picture of images in rows; its labels lie beside
it, one byte each.
"""

from __future__ import annotations

import io
from importlib import resources
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from fedu2.data.base import Dataset, ImageSet, datasets
from fedu2.data.cifar import CIFAR10_CLASSES
from fedu2.errors import DataError
from fedu2.options import DataOptions

__all__ = ["load_sample", "write_sheet"]

SIDE = 32
COLUMNS = 100  # images in a row of a sheet


@datasets.register("sample")
def load_sample(options: DataOptions) -> Dataset:
    """The embedded sample: 400 training and 100 test images of each of the 10 classes."""
    return Dataset("sample", _read_sheet("train"), _read_sheet("test"), CIFAR10_CLASSES)


def _read_sheet(split: str) -> ImageSet:
    folder = resources.files("fedu2.data") / "sample"
    try:
        labels = np.frombuffer((folder / f"{split}.labels").read_bytes(), np.uint8)
        with Image.open(io.BytesIO((folder / f"{split}.webp").read_bytes()), formats=["WEBP"]) as sheet:
            pixels = np.asarray(sheet.convert("RGB"))
        grid = pixels.reshape(-1, SIDE, COLUMNS, SIDE, 3).transpose(0, 2, 4, 1, 3)
        images = np.ascontiguousarray(grid).reshape(-1, 3, SIDE, SIDE)
        return ImageSet(torch.from_numpy(images), torch.from_numpy(labels.astype(np.int64)))
    except (OSError, ValueError) as error:
        raise DataError(f"the embedded sample is damaged ({error}): install fedu2 again") from error


def write_sheet(folder: Path, split: str, images: ImageSet) -> None:
    """The inverse: `split`.webp and `split`.labels in `folder`, as small as lossless WebP gets."""
    if images.labels is None or len(images) % COLUMNS or images.images.shape[-1] != SIDE:
        raise DataError(f"a sheet takes labelled {SIDE}×{SIDE} images, a multiple of {COLUMNS} of them")
    grid = images.images.numpy().reshape(-1, COLUMNS, 3, SIDE, SIDE).transpose(0, 3, 1, 4, 2)
    sheet = Image.fromarray(np.ascontiguousarray(grid).reshape(-1, COLUMNS * SIDE, 3))
    folder.mkdir(parents=True, exist_ok=True)
    sheet.save(folder / f"{split}.webp", lossless=True, quality=100, method=6, exact=True)
    (folder / f"{split}.labels").write_bytes(images.labels.to(torch.uint8).numpy().tobytes())
