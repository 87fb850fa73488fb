"""CIFAR-10 and CIFAR-100 as published, in official order; CIFAR-100 with its 100 fine labels.

A. Krizhevsky, V. Nair, G. Hinton, https://www.cs.toronto.edu/~kriz/cifar.html. Both exist in a "binary version" and
a "python version"; either is read, from the archive in place or from the unpacked directory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from fedu2.data.archives import read_archive, read_folder
from fedu2.data.base import Dataset, ImageSet, datasets
from fedu2.data.cache import cache_directory
from fedu2.data.download import download
from fedu2.data.safe_pickle import UnsafePickleError, load_plain
from fedu2.errors import DataError
from fedu2.files import user_path
from fedu2.options import DataOptions

__all__ = ["CIFAR10", "CIFAR100", "Release", "find_release", "load_cifar10", "load_cifar100", "read_release"]

HOME = "https://www.cs.toronto.edu/~kriz/"
PIXELS = 3 * 32 * 32  # a red, a green and a blue plane, each by rows
MAX_FILE = 160 << 20  # the largest official file has 155 MB
MAX_UNPACKED = 200 << 20  # all official files of one archive together have 187 MB

Labelled = tuple[NDArray[np.uint8], NDArray[np.uint8]]  # planes (N, 3072), labels (N,)
Decode = Callable[[bytes], Labelled]


def _binary(label_bytes: int) -> Decode:
    """Records of `label_bytes` labels, of which the last one counts, and 3072 bytes of pixels."""
    record = label_bytes + PIXELS

    def decode(blob: bytes) -> Labelled:
        if not blob or len(blob) % record:
            raise ValueError(f"its {len(blob):,} bytes are not a whole number of records of {record} bytes")
        records = np.frombuffer(blob, np.uint8).reshape(-1, record)
        return records[:, label_bytes:], records[:, label_bytes - 1]

    return decode


def _pickled(label_key: str) -> Decode:
    """A pickled dictionary with `data`, uint8 (N, 3072), and a list of labels under `label_key`."""

    def decode(blob: bytes) -> Labelled:
        content = load_plain(blob)
        if not isinstance(content, dict):
            raise UnsafePickleError("the pickle is not a dictionary")
        # Python 2 wrote byte strings, some later tools wrote bytes: both mean the same keys.
        named = {key.decode("latin1") if isinstance(key, bytes) else key: item for key, item in content.items()}
        planes, labels = named.get("data"), named.get(label_key)
        if not isinstance(planes, np.ndarray) or planes.ndim != 2 or planes.shape[1] != PIXELS:
            raise UnsafePickleError(f"the pickle has no array 'data' of shape (N, {PIXELS})")
        if not isinstance(labels, list) or not all(type(y) is int and 0 <= y < 256 for y in labels):
            raise UnsafePickleError(f"the pickle has no list {label_key!r} of class numbers")
        return planes, np.array(labels, np.uint8)

    return decode


@dataclass(frozen=True)
class Release:
    """One published form of one data set: an archive that holds one folder of files."""

    archive: str
    md5: str
    folder: str
    train: tuple[str, ...]
    test: str
    images: tuple[int, int]  # in each training file, in the test file
    classes: int
    decode: Decode

    @property
    def files(self) -> dict[str, int]:
        """The files that are read, with the number of images in each."""
        return {**dict.fromkeys(self.train, self.images[0]), self.test: self.images[1]}


_BATCHES = tuple(f"data_batch_{i}" for i in range(1, 6))

CIFAR10 = (
    Release(
        archive="cifar-10-binary.tar.gz",
        md5="c32a1d4ab5d03f1284b67883e8d87530",
        folder="cifar-10-batches-bin",
        train=tuple(f"{name}.bin" for name in _BATCHES),
        test="test_batch.bin",
        images=(10_000, 10_000),
        classes=10,
        decode=_binary(label_bytes=1),
    ),
    Release(
        archive="cifar-10-python.tar.gz",
        md5="c58f30108f718f92721af3b95e74349a",
        folder="cifar-10-batches-py",
        train=_BATCHES,
        test="test_batch",
        images=(10_000, 10_000),
        classes=10,
        decode=_pickled("labels"),
    ),
)
CIFAR100 = (
    Release(
        archive="cifar-100-binary.tar.gz",
        md5="03b5dce01913d631647c71ecec9e9cb8",
        folder="cifar-100-binary",
        train=("train.bin",),
        test="test.bin",
        images=(50_000, 10_000),
        classes=100,
        decode=_binary(label_bytes=2),  # coarse, then fine
    ),
    Release(
        archive="cifar-100-python.tar.gz",
        md5="eb9058c3a382ffc7106e4002c42a8d85",
        folder="cifar-100-python",
        train=("train",),
        test="test",
        images=(50_000, 10_000),
        classes=100,
        decode=_pickled("fine_labels"),
    ),
)

_CIFAR10_NAMES = "airplane automobile bird cat deer dog frog horse ship truck"
_CIFAR100_NAMES = """
    apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly camel can
    castle caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup dinosaur dolphin
    elephant flatfish forest fox girl hamster house kangaroo keyboard lamp lawn_mower leopard lion lizard lobster man
    maple_tree motorcycle mountain mouse mushroom oak_tree orange orchid otter palm_tree pear pickup_truck pine_tree
    plain plate poppy porcupine possum rabbit raccoon ray road rocket rose sea seal shark shrew skunk skyscraper snail
    snake spider squirrel streetcar sunflower sweet_pepper table tank telephone television tiger tractor train trout
    tulip turtle wardrobe whale willow_tree wolf woman worm
"""
CIFAR10_CLASSES = tuple(_CIFAR10_NAMES.split())
CIFAR100_CLASSES = tuple(_CIFAR100_NAMES.split())


@datasets.register("cifar10")
def load_cifar10(options: DataOptions) -> Dataset:
    """CIFAR-10: 50,000 training and 10,000 test images of 10 classes."""
    return _load("cifar10", CIFAR10, CIFAR10_CLASSES, options)


@datasets.register("cifar100")
def load_cifar100(options: DataOptions) -> Dataset:
    """CIFAR-100: 50,000 training and 10,000 test images of 100 classes."""
    return _load("cifar100", CIFAR100, CIFAR100_CLASSES, options)


def _load(name: str, releases: tuple[Release, ...], classes: tuple[str, ...], options: DataOptions) -> Dataset:
    root = None if options.root is None else user_path(options.root)
    if root is not None and not root.exists():
        raise DataError(f"data.root={root} does not exist; it should hold {_expected(releases)}")
    found = find_release(releases, root) or _fetch(name, releases, root, options.download)
    train, test = read_release(*found)
    return Dataset(name, train, test, classes)


def find_release(releases: tuple[Release, ...], root: Path | None) -> tuple[Path, Release] | None:
    """The first release found: in `root` before its sub-folders before the cache, unpacked before packed."""
    for place in _places(root):
        for release in releases:
            unpacked = (place / release.folder, place)
            if folder := next((path for path in unpacked if _holds(path, release)), None):
                return folder, release
        for release in releases:
            packed = (place / release.archive, place)
            if archive := next((path for path in packed if path.name == release.archive and path.is_file()), None):
                return archive, release
    return None


def _holds(folder: Path, release: Release) -> bool:
    # One file is enough: that another one is missing is then told by name.
    return any((folder / file).is_file() for file in release.files) and (
        folder.name == release.folder or all((folder / file).is_file() for file in release.files)
    )


def _places(root: Path | None) -> list[Path]:
    if root is None:
        return [cache_directory()]
    try:
        below = sorted(path for path in root.iterdir() if path.is_dir()) if root.is_dir() else []
    except OSError as error:
        raise DataError(f"data.root={root} cannot be read ({error})") from error
    return [root, *below, cache_directory()]


def _fetch(name: str, releases: tuple[Release, ...], root: Path | None, allowed: bool) -> tuple[Path, Release]:
    """Download the first release to the cache."""
    release = releases[0]
    why = "data.download is off"
    if allowed:
        try:
            return download(HOME + release.archive, cache_directory() / release.archive, release.md5), release
        except DataError as error:
            why = str(error)
    searched = " and ".join(str(path) for path in (root, cache_directory()) if path is not None)
    raise DataError(
        f"{name} was not found: put {_expected(releases)} into {searched}, or name its directory with data.root=PATH; "
        f"it was not downloaded because {why}"
    )


def _expected(releases: tuple[Release, ...]) -> str:
    return " or ".join(f"{known.archive} (or its folder {known.folder})" for known in releases)


def read_release(source: Path, release: Release) -> tuple[ImageSet, ImageSet]:
    """Training and test images of a folder or an archive, in official order."""
    if source.is_file():
        members = read_archive(source, release.folder, release.files, MAX_FILE, MAX_UNPACKED)
    else:
        members = read_folder(source, release.files, MAX_FILE)
    parts = {file: _decoded(blob, f"{file} in {source}", release, release.files[file]) for file, blob in members}
    if missing := [file for file in release.files if file not in parts]:
        raise DataError(f"{source} is incomplete: {', '.join(missing)} is missing")
    return _joined([parts[file] for file in release.train]), _joined([parts[release.test]])


def _decoded(blob: bytes, origin: str, release: Release, images: int) -> Labelled:
    try:
        planes, labels = release.decode(blob)
    except ValueError as error:
        raise DataError(f"{origin} is damaged or not a CIFAR file: {error}") from error
    if len(planes) != images or len(labels) != images:
        found = f"{len(planes):,} images and {len(labels):,} labels"
        raise DataError(f"{origin} is damaged or truncated: it has {found} instead of {images:,}")
    if labels.max() >= release.classes:
        raise DataError(f"{origin} is damaged: it has a label {labels.max()}, of {release.classes} classes")
    return planes, labels


def _joined(parts: list[Labelled]) -> ImageSet:
    planes = np.concatenate([planes for planes, _ in parts])
    labels = np.concatenate([labels for _, labels in parts])
    return ImageSet(torch.from_numpy(planes).view(-1, 3, 32, 32), torch.from_numpy(labels.astype(np.int64)))
