"""Make the embedded sample from CIFAR-10: `python tools/make_sample.py CIFAR10_DIRECTORY [OUT]`.

Of each class, the first 400 images of the official training set and the first 100 of the official test set, in
official order.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from fedu2.data import ImageSet, load_dataset
from fedu2.data.embedded import write_sheet
from fedu2.options import DataOptions

SAMPLE = Path(__file__).parent.parent / "src" / "fedu2" / "data" / "sample"


def first_of_each_class(images: ImageSet, count: int) -> ImageSet:
    """The first `count` images of every class, in the order of `images`."""
    assert images.labels is not None
    first = [(images.labels == label).nonzero().flatten()[:count] for label in images.labels.unique()]
    return images.subset(torch.cat(first).sort().values)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cifar10", help="directory that holds CIFAR-10")
    parser.add_argument("out", nargs="?", type=Path, default=SAMPLE)
    arguments = parser.parse_args()
    dataset = load_dataset("cifar10", DataOptions(root=arguments.cifar10, download=False))
    write_sheet(arguments.out, "train", first_of_each_class(dataset.train, 400))
    write_sheet(arguments.out, "test", first_of_each_class(dataset.test, 100))


if __name__ == "__main__":
    main()
