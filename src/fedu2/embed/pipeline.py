"""Pictures → decoded batches → vectors → one file; memory holds two batches, and the vectors at the end."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import PIL
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedu2._version import __version__
from fedu2.data.decode import DECODER_VERSION, decode_files
from fedu2.embed.parts import Parts, partial
from fedu2.embed.pictures import Images, Picture, find
from fedu2.embed.results import Embedding, save, writers
from fedu2.engine import choose_device
from fedu2.errors import DataError, UsageError
from fedu2.evaluation.monitor import extract, finite
from fedu2.files import shown, user_path
from fedu2.run import Run
from fedu2.rundir import RunDirectory

__all__ = ["embed"]

log = logging.getLogger("fedu2")

Watch = Callable[[int, int], None]
Decoded = tuple[Tensor, dict[int, str]]


def embed(
    run: Run,
    images: Images,
    out: str | Path,
    *,
    best: bool = False,
    device: str = "auto",
    batch_size: int = 256,
    normalize: bool = False,
    force: bool = False,
    watch: Watch = lambda done, total: None,
) -> Embedding:
    """Features of `images` (see `fedu2.embed.pictures.find`) by the run's encoder, written to `out` and returned.

    Interrupted at any moment, the same call goes on where it stopped; a changed list, file, model or option begins
    anew.  Images that cannot be read are skipped, named in a warning and in the result.

    normalize: vectors of length 1.  force: overwrite `out`.  watch: called with the number of images that are done, and
    of all.
    """
    out = user_path(out)
    _check(run, out, batch_size, force)
    place = choose_device(device)
    learner, round_ = run.model(place, best=best)
    encoder = learner.encoder
    size = run.experiment.data.image_size
    pictures = find(images)
    about = {**_about(run, round_), "dimension": encoder.features, "normalized": normalize}
    with partial(out, _key(encoder, pictures, [size, batch_size, normalize])) as parts:
        batches = [pictures[start : start + batch_size] for start in range(0, len(pictures), batch_size)]
        todo = [number for number in range(len(batches)) if number not in parts]
        done = len(pictures) - sum(len(batches[number]) for number in todo)
        watch(done, len(pictures))
        for number, (pixels, reasons) in _decoded([(number, batches[number]) for number in todo], size):
            parts.write(number, _vectors(encoder, pixels.to(place), normalize), reasons)
            done += len(batches[number])
            watch(done, len(pictures))
        embedding = _gather(parts, batches, about)
        if embedding.files:
            save(embedding, out)
        parts.clear()
    if not embedding.files:
        raise DataError(f"none of the {len(pictures)} images can be read; the first: {shown(embedding.skipped[0])}")
    return embedding


def _check(run: Run, out: Path, batch_size: int, force: bool) -> None:
    """Refuse what cannot end well before anything is computed."""
    writers[out.suffix.lower()]  # an unknown ending explains itself
    if not RunDirectory(run.path).begun():
        raise UsageError(f"{run.path} holds no run")
    if batch_size < 1:
        raise UsageError(f"a batch has at least one image, not {batch_size}")
    if out.is_dir():
        raise UsageError(f"{out} is a directory")
    if out.exists() and not force:
        raise UsageError(f"{out} exists already: --force overwrites it")


def _about(run: Run, round_: int) -> dict[str, Any]:
    experiment = run.experiment
    return {
        "run": run.path.resolve().name,
        "method": experiment.method,
        "encoder": experiment.encoder,
        "round": round_,
        "image_size": experiment.data.image_size,
        "fedu2": __version__,
    }


def _key(encoder: nn.Module, pictures: Sequence[Picture], options: list[Any]) -> str:
    """A digest of all that decides the parts: weights, files by name, size and time, options, decoder.

    Not the device: it changes vectors by rounding only, and an interrupted embedding may go on elsewhere.
    """
    digest = hashlib.blake2b(json.dumps([DECODER_VERSION, PIL.__version__, options]).encode(), digest_size=12)
    for name, tensor in encoder.state_dict().items():
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().numpy())
    for picture in pictures:
        digest.update(json.dumps([picture.name, str(picture.path.absolute()), *_stamp(picture.path)]).encode())
    return digest.hexdigest()


def _stamp(path: Path) -> tuple[int, int]:
    try:
        stat = path.stat()
    except (OSError, ValueError):
        return (-1, -1)
    return stat.st_size, stat.st_mtime_ns


def _decoded(batches: Sequence[tuple[int, Sequence[Picture]]], size: int) -> Iterator[tuple[int, Decoded]]:
    """Each batch as uint8 images and reasons, decoded while the one before it is in use."""
    with ThreadPoolExecutor(1) as ahead:
        upcoming = [ahead.submit(_decode, batch, size) for _, batch in batches[:1]]
        for position, (number, _) in enumerate(batches):
            ready = upcoming.pop().result()
            upcoming = [ahead.submit(_decode, batch, size) for _, batch in batches[position + 1 : position + 2]]
            yield number, ready


def _decode(batch: Sequence[Picture], size: int) -> Decoded:
    pixels, reasons = decode_files([picture.path for picture in batch], size)
    missing = {i: "does not exist" for i in reasons if _stamp(batch[i].path) == (-1, -1)}
    return pixels, reasons | missing


def _vectors(encoder: nn.Module, pixels: Tensor, normalize: bool) -> Tensor:
    if not len(pixels):
        return torch.zeros(0, int(encoder.features))  # type: ignore[arg-type]
    features = finite(extract(encoder, pixels, len(pixels))).cpu()
    return F.normalize(features, dim=1) if normalize else features


def _gather(parts: Parts, batches: Sequence[Sequence[Picture]], about: dict[str, Any]) -> Embedding:
    """All parts in order, each read into its place, so that no vector is in memory twice."""
    vectors = np.empty((sum(map(len, batches)), about["dimension"]), np.float32)
    files: list[str] = []
    skipped: list[str] = []
    for number, batch in enumerate(batches):
        part, reasons = parts.read(number)
        vectors[len(files) : len(files) + len(part)] = part.numpy()
        files += [picture.name for i, picture in enumerate(batch) if i not in reasons]
        skipped += [f"{batch[i].name}: {reason}" for i, reason in sorted(reasons.items())]
    if skipped and files:
        more = "; …" if len(skipped) > 5 else ""
        first = "; ".join(map(shown, skipped[:5]))
        log.warning("%d of %d images cannot be read and are skipped: %s%s", len(skipped), len(vectors), first, more)
    return Embedding(vectors[: len(files)], tuple(files), tuple(skipped), about)
