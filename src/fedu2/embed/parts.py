"""Work that can be interrupted at any moment: a batch is a file, written whole, and not done twice.

vectors.npz.partial/KEY-000012.safetensors     vectors of batch 12, and what in it was not readable

The key is a digest of all that decides the vectors. Parts with another key are of no use and go.
"""

from __future__ import annotations

import fcntl
import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from fedu2.errors import UsageError
from fedu2.files import atomic_file, lock_file

__all__ = ["Parts", "partial"]

log = logging.getLogger("fedu2")


class Parts:
    """The batches that are done."""

    def __init__(self, folder: Path, key: str) -> None:
        self.folder = folder
        self.key = key

    def path(self, number: int) -> Path:
        return self.folder / f"{self.key}-{number:06d}.safetensors"

    def __contains__(self, number: int) -> bool:
        try:
            with safe_open(self.path(number), framework="pt"):
                return True
        except (OSError, SafetensorError):
            return False

    def write(self, number: int, vectors: Tensor, reasons: dict[int, str]) -> None:
        """vectors: (n, D) of the readable images of a batch; reasons: position in it → why not, of the others."""
        with atomic_file(self.path(number)) as temporary:
            save_file({"vectors": vectors.contiguous()}, temporary, {"reasons": json.dumps(reasons)})

    def read(self, number: int) -> tuple[Tensor, dict[int, str]]:
        """What was written."""
        with safe_open(self.path(number), framework="pt") as content:
            reasons = json.loads(content.metadata()["reasons"])
            vectors: Tensor = content.get_tensor("vectors")
        return vectors.to(torch.float32), {int(position): reason for position, reason in reasons.items()}

    def forget_others(self) -> None:
        """Remove the parts of another list, model or option, and what a crash left half-written."""
        others = [file for file in self.folder.glob("*.safetensors") if not file.name.startswith(f"{self.key}-")]
        if others:
            log.info("%s is of other images, another model or other options: beginning anew", self.folder)
        for file in [*others, *self.folder.glob(".*.safetensors.*")]:
            file.unlink()

    def clear(self) -> None:
        """Remove all parts: they are no longer needed."""
        for file in self.folder.glob(f"{self.key}-*.safetensors"):
            file.unlink()


@contextmanager
def partial(out: Path, key: str) -> Iterator[Parts]:
    """The parts of `out` that are there already, kept from other processes; a folder without parts does not stay."""
    folder = out.with_name(f"{out.name}.partial")
    missing = [parent for parent in folder.parents if not parent.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    lock = folder / ".lock"
    with lock_file(lock) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UsageError(f"{out} is being written by another process") from None
        parts = Parts(folder, key)
        parts.forget_others()
        try:
            yield parts
        finally:
            lock.unlink(missing_ok=True)
            with suppress(OSError):  # not empty: something is worth keeping
                for made in (folder, *missing):
                    made.rmdir()
