"""Embeddings on disk: .npz, .safetensors and .csv, by the ending of the file's name."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from fedu2.files import atomic_file
from fedu2.registry import Registry

__all__ = ["Embedding", "save", "writers"]


@dataclass(frozen=True, eq=False)
class Embedding:
    """vectors: float32 (N, D); files: their N names; skipped: "file: reason" of each that was not readable.

    about: run, method, encoder, round, dimension and options, to be told from other embeddings.
    """

    vectors: NDArray[np.float32]
    files: tuple[str, ...]
    skipped: tuple[str, ...]
    about: Mapping[str, Any]


Writer = Callable[[Embedding, Path], None]
writers: Registry[Writer] = Registry("ending of an output file")


def save(embedding: Embedding, out: Path) -> None:
    """Write `out`, which is there whole or as it was before."""
    with atomic_file(out) as temporary:
        writers[out.suffix.lower()](embedding, temporary)


@writers.register(".npz")
def _npz(embedding: Embedding, path: Path) -> None:
    """Arrays `vectors`, `files`, `skipped`, and `about` as JSON; no pickles."""
    with path.open("wb") as file:  # by its name alone, NumPy would add its ending
        np.savez(
            file,
            vectors=embedding.vectors,
            files=np.array(embedding.files, dtype=np.str_),
            skipped=np.array(embedding.skipped, dtype=np.str_),
            about=np.array(json.dumps(embedding.about)),
        )


@writers.register(".safetensors")
def _safetensors(embedding: Embedding, path: Path) -> None:
    """Tensor `vectors`; `files` and `skipped` as bytes of JSON lists, too long for metadata; `about` is there."""
    names = {"files": embedding.files, "skipped": embedding.skipped}
    listed = {key: np.frombuffer(json.dumps(value).encode(), np.uint8) for key, value in names.items()}
    path.touch()
    mode = path.stat().st_mode  # as the user's other files; save_file would let nobody else read it
    save_file({"vectors": embedding.vectors, **listed}, path, {"about": json.dumps(embedding.about)})
    path.chmod(mode)


@writers.register(".csv")
def _csv(embedding: Embedding, path: Path) -> None:
    """A header, then a row an image: file, 0, 1, ..., D − 1; the shortest digits that give the same float32 back."""
    with path.open("w", encoding="utf-8", errors="surrogateescape", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(["file", *range(embedding.vectors.shape[1])])
        for name, vector in zip(embedding.files, embedding.vectors, strict=True):
            table.writerow([name, *map(str, vector)])
