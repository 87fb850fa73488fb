"""Images in memory: what every data set looks like after loading, whatever it looked like on disk.

A data set is a function of `DataOptions`, known by name:

    @datasets.register("mine")
    def load_mine(options: DataOptions) -> Dataset: ...
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from fedu2.data.holdout import held_out
from fedu2.errors import DataError
from fedu2.options import DataOptions
from fedu2.registry import Registry

__all__ = ["Dataset", "ImageSet", "datasets", "load_dataset", "resize_images"]


@dataclass(frozen=True, eq=False)
class ImageSet:
    """Square RGB images, and their classes where these are known.

    images: uint8 (N, 3, S, S); labels: int64 (N,) or None.
    """

    images: Tensor
    labels: Tensor | None

    def __post_init__(self) -> None:
        shape, dtype = tuple(self.images.shape), self.images.dtype
        if len(shape) != 4 or shape[1] != 3 or shape[2] != shape[3] or dtype != torch.uint8:
            raise DataError(f"images must be uint8 of shape (N, 3, S, S), not {dtype} of shape {shape}")
        if self.labels is not None and (self.labels.shape != shape[:1] or self.labels.dtype != torch.int64):
            found = f"{self.labels.dtype} of shape {tuple(self.labels.shape)}"
            raise DataError(f"labels must be int64 of shape ({shape[0]},), one per image, not {found}")

    def __len__(self) -> int:
        return len(self.images)

    def to(self, device: torch.device | str) -> ImageSet:
        """The same images on `device`."""
        return ImageSet(self.images.to(device), None if self.labels is None else self.labels.to(device))

    def subset(self, indices: Tensor) -> ImageSet:
        """The images at `indices` (int64), in that order."""
        indices = indices.to(self.images.device)
        return ImageSet(self.images[indices], None if self.labels is None else self.labels[indices])


@dataclass(frozen=True, eq=False)
class Dataset:
    """Training and test images of one source.

    owners: int64 (N_train,), the client of each training image when the data come already split, else None;
    client_names: the names of these clients; skipped: "file: reason" for every file that could not be used.
    """

    name: str
    train: ImageSet
    test: ImageSet
    classes: tuple[str, ...] = ()
    owners: Tensor | None = None
    client_names: tuple[str, ...] = ()
    skipped: tuple[str, ...] = ()

    def digest(self) -> str:
        """Two fingerprints, by which a resumed run knows what it began with: training images, and labels and tests."""
        rest = (self.train.labels, self.test.images, self.test.labels)
        return f"{_fingerprint(self.train.images)} {_fingerprint(*rest)}"

    def to(self, device: torch.device | str) -> Dataset:
        """The same data with images and labels on `device`; owners stay, for partitions are made on the host."""
        return replace(self, train=self.train.to(device), test=self.test.to(device))


datasets: Registry[Callable[[DataOptions], Dataset]] = Registry("dataset")


def load_dataset(name: str, options: DataOptions) -> Dataset:
    """The data set called `name`, its images `options.image_size` pixels wide and high.

    With `options.validation` the test images are not to be had at all: what is tuned cannot have seen them.
    """
    dataset = datasets[name](options)
    if options.validation > 0:
        dataset = _for_tuning(dataset, options.validation)
    return replace(
        dataset,
        train=_resized(dataset.train, options.image_size),
        test=_resized(dataset.test, options.image_size),
    )


def resize_images(images: Tensor, size: int, batch_size: int = 1024) -> Tensor:
    """Bicubic, antialiased: uint8 (N, 3, S, S) → uint8 (N, 3, size, size)."""
    resized = images.new_empty(len(images), 3, size, size)
    # In batches, because the floating-point copy takes four times the memory.
    for start in range(0, len(images), batch_size):
        batch = images[start : start + batch_size].float()
        smooth = functional.interpolate(batch, (size, size), mode="bicubic", antialias=True)
        resized[start : start + batch_size] = smooth.round_().clamp_(0, 255)
    return resized


def _fingerprint(*tensors: Tensor | None) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for tensor in tensors:
        if len(tensors) > 1:  # where one ends and the next begins
            digest.update(f"{None if tensor is None else tuple(tensor.shape)};".encode())
        if tensor is not None:
            digest.update(tensor.cpu().contiguous().numpy().data)
    return digest.hexdigest()


def _for_tuning(dataset: Dataset, share: float) -> Dataset:
    """`share` of the training images, of every client and class, in the place of the test images."""
    owners = dataset.owners if dataset.owners is not None else torch.zeros(len(dataset.train), dtype=torch.int64)
    chosen = held_out(owners, dataset.train.labels, share)
    kept = None if dataset.owners is None else owners[~chosen]
    train, test = (dataset.train.subset(places.nonzero()[:, 0]) for places in (~chosen, chosen))
    return replace(dataset, train=train, test=test, owners=kept)


def _resized(images: ImageSet, size: int) -> ImageSet:
    if images.images.shape[-1] == size:
        return images
    return ImageSet(resize_images(images.images, size), images.labels)
