"""Image files of any kind to square RGB tensors: in parallel, once, and without trusting the files."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from threading import Lock

import numpy as np
import PIL
import torch
from numpy.typing import NDArray
from PIL import Image, ImageOps
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from fedu2.data.cache import cache_directory
from fedu2.files import atomic_file, shown

__all__ = ["decode_cached", "decode_files", "decode_image", "looks_like_image"]

log = logging.getLogger("fedu2")

DECODER_VERSION = 1  # raise it when the pixels that come out change: caches are then made anew

# Formats that Pillow opens only to call another program, that are no pictures, or whose pixels it cannot read; and
# icons, which hold pictures whose size is not known before they are decoded.
UNWANTED = {"BUFR", "EPS", "GRIB", "HDF5", "ICNS", "ICO", "MPEG", "WMF"}
MAX_THREADS = 8
MAX_PIXELS = 64_000_000  # to decode: up to 12 bytes each are in memory at a time
# Of formats whose decoders hold more: 36 bytes (JPEG 2000 with deep colours), 17 (WebP), by reckoning 23 (AVIF).
MAX_PIXELS_OF = {"JPEG2000": 25_000_000, "WEBP": 50_000_000, "AVIF": 36_000_000}
LARGE = 4_000_000  # pixels: of pictures beyond, one at a time is in memory
STRIP = 1_000_000  # pixels that are converted at once
_large = Lock()


@cache
def _formats() -> tuple[str, ...]:
    """The formats that are read."""
    Image.init()
    return tuple(sorted(set(Image.OPEN) - UNWANTED))


@cache
def _suffixes() -> frozenset[str]:
    formats = _formats()
    return frozenset(suffix for suffix, name in Image.registered_extensions().items() if name in formats)


def looks_like_image(path: Path) -> bool:
    """Whether the name ends as pictures do; what is in the file is another matter."""
    return path.suffix.lower() in _suffixes()


def decode_files(paths: Sequence[Path], size: int) -> tuple[Tensor, dict[int, str]]:
    """All readable images in order, uint8 (N, 3, size, size), and for the others position → reason."""
    images: list[NDArray[np.uint8]] = []
    reasons: dict[int, str] = {}
    with ThreadPoolExecutor(min(MAX_THREADS, os.cpu_count() or 1)) as pool:
        for position, result in enumerate(pool.map(lambda path: _try_decode(path, size), paths)):
            if isinstance(result, str):
                reasons[position] = result
            else:
                images.append(result)
    stacked = np.stack(images) if images else np.zeros((0, 3, size, size), np.uint8)
    return torch.from_numpy(stacked), reasons


def _try_decode(path: Path, size: int) -> NDArray[np.uint8] | str:
    try:
        return decode_image(path, size)
    except Exception as error:  # Pillow's decoders fail in all sorts of ways on damaged files
        return shown(str(error).replace(str(path), path.name).strip()) or type(error).__name__


def decode_image(path: Path, size: int) -> NDArray[np.uint8]:
    """One picture as uint8 (3, size, size): upright, in RGB, the shorter side scaled to `size`, the centre cut out.

    Of an animation the first frame, of a transparent picture its look on white.
    """
    if not path.is_file():  # reading a pipe or a device might never end
        raise ValueError("is no regular file")
    with Image.open(path, formats=_formats()) as image:
        _refuse_bomb(image, Image.MAX_IMAGE_PIXELS)
        # JPEG decoders can shrink while they decode: far quicker, and still twice as fine as what is needed.
        image.draft(None, (2 * size, 2 * size))
        _refuse_bomb(image, MAX_PIXELS_OF.get(image.format or "", MAX_PIXELS))
        with _large if image.width * image.height > LARGE else nullcontext():
            ImageOps.exif_transpose(image, in_place=True)
            square = ImageOps.fit(_to_rgb(image), (size, size), Image.Resampling.BICUBIC)
    return np.ascontiguousarray(np.asarray(square).transpose(2, 0, 1))


def _refuse_bomb(image: Image.Image, limit: int | None) -> None:
    if limit is not None and image.width * image.height > limit:
        raise ValueError(f"its {image.width}×{image.height} pixels are more than the limit of {limit:,}")


def _to_rgb(image: Image.Image) -> Image.Image:
    """By strips: the copies that are made on the way would take several times the memory of the picture."""
    rgb = Image.new("RGB", image.size)
    span = _span(image) if _is_wide(image) else None
    for top, strip in _strips(image):
        rgb.paste(_strip_to_rgb(strip, span), (0, top))
    return rgb


def _strips(image: Image.Image) -> Iterator[tuple[int, Image.Image]]:
    """Rows from the top on, and the picture in them."""
    rows = max(1, STRIP // image.width)
    for top in range(0, image.height, rows):
        yield top, image.crop((0, top, image.width, min(top + rows, image.height)))


def _strip_to_rgb(image: Image.Image, span: tuple[float, float] | None) -> Image.Image:
    if _is_wide(image):
        image = Image.fromarray(_to_bytes(_grey(image), span))
    if image.has_transparency_data:
        white = Image.new("RGBA", image.size, "white")
        return Image.alpha_composite(white, image.convert("RGBA")).convert("RGB")
    return image.convert("RGB")


def _is_wide(image: Image.Image) -> bool:
    return image.mode.startswith("I") or image.mode == "F"


def _grey(image: Image.Image) -> NDArray[np.float64]:
    return np.nan_to_num(np.asarray(image).astype(np.float64), posinf=0.0, neginf=0.0)


def _span(image: Image.Image) -> tuple[float, float] | None:
    """The range of wide and floating grey values, which is open; None where they have 16 bits."""
    if image.mode.startswith("I;16") or image.format == "PNG":  # PNG has no wider values than 16 bits
        return None
    ranges = [(float(grey.min()), float(grey.max())) for grey in (_grey(strip) for _, strip in _strips(image))]
    return min(low for low, _ in ranges), max(high for _, high in ranges)


def _to_bytes(grey: NDArray[np.float64], span: tuple[float, float] | None) -> NDArray[np.uint8]:
    """Values of 16 bits divided by 257; others stretched from their range."""
    if span is None:
        return np.clip(np.rint(grey / 257), 0, 255).astype(np.uint8)
    low, high = span
    scaled: NDArray[np.float64] = np.rint((grey - low) * (255 / (high - low) if high > low else 0))
    return scaled.astype(np.uint8)


def decode_cached(root: Path, paths: list[Path], size: int) -> tuple[Tensor, dict[int, str]]:
    """`decode_files`, remembered between runs: one cache file per root and size, made anew when a file changes."""
    place = hashlib.blake2b(json.dumps([str(root), size]).encode(), digest_size=16).hexdigest()
    file = cache_directory() / "folder" / f"{place}.safetensors"
    key = _fingerprint(root, paths, size)
    cached = _read_cache(file, key)
    if cached is not None:
        return cached
    log.info("decoding %d images in %s", len(paths), shown(root))
    images, reasons = decode_files(paths, size)
    _write_cache(file, key, images, reasons)
    return images, reasons


def _fingerprint(root: Path, paths: list[Path], size: int) -> str:
    """A digest of all that decides the pixels: the files by name, size, time and permission, and the decoder."""
    digest = hashlib.blake2b(json.dumps([DECODER_VERSION, PIL.__version__, size]).encode(), digest_size=32)
    for path in paths:
        try:
            stat = path.stat()
            facts = [stat.st_size, stat.st_mtime_ns, os.access(path, os.R_OK)]
        except OSError as error:
            facts = [error.errno or 0]
        digest.update(json.dumps([str(path.relative_to(root)), *facts]).encode())
    return digest.hexdigest()


def _read_cache(file: Path, key: str) -> tuple[Tensor, dict[int, str]] | None:
    """What was decoded under `key`; None when there is nothing, or nothing that can be trusted."""
    try:
        with safe_open(file, framework="pt") as content:
            facts = content.metadata() or {}
            if facts.get("key") != key:
                return None
            images = content.get_tensor("images")
    except (OSError, SafetensorError):
        return None
    if facts.get("checksum") != _checksum(images, facts.get("reasons", "")):
        log.warning("the cache %s is damaged and made anew", file)
        return None
    return images, {int(position): reason for position, reason in json.loads(facts["reasons"]).items()}


def _write_cache(file: Path, key: str, images: Tensor, reasons: dict[int, str]) -> None:
    text = json.dumps(reasons)
    facts = {"key": key, "reasons": text, "checksum": _checksum(images, text)}
    try:
        with atomic_file(file) as temporary:
            save_file({"images": images}, temporary, facts)
    except (OSError, SafetensorError) as error:
        log.warning("decoded images are not cached: %s cannot be written (%s)", file, error)


def _checksum(images: Tensor, reasons: str) -> str:
    pixels: NDArray[np.uint8] = images.numpy()
    return str(zlib.crc32(reasons.encode(), zlib.crc32(pixels.data if pixels.size else b"")))
