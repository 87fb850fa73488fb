"""Images in, clients' shares out: `load_dataset(name, options)`, then `make_partition(dataset, experiment)`."""

from __future__ import annotations

from fedu2.data import cifar, embedded, folder  # noqa: F401  (their data sets register on import)
from fedu2.data.base import Dataset, ImageSet, datasets, load_dataset
from fedu2.data.cache import cache_directory
from fedu2.data.partition import digest_of_partition, load_partition, make_partition, partition, save_partition

__all__ = [
    "Dataset",
    "ImageSet",
    "cache_directory",
    "datasets",
    "digest_of_partition",
    "load_dataset",
    "load_partition",
    "make_partition",
    "partition",
    "save_partition",
]

datasets.seal()
