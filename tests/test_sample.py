from __future__ import annotations

from importlib import resources

import numpy as np
import pytest
import torch
from PIL import Image

from fedu2.data import Dataset, ImageSet, datasets, load_dataset
from fedu2.data.base import resize_images
from fedu2.data.embedded import write_sheet
from fedu2.errors import DataError, UsageError
from fedu2.options import DataOptions


@pytest.fixture(scope="module")
def sample() -> Dataset:
    return load_dataset("sample", DataOptions())


def test_is_small():
    folder = resources.files("fedu2.data") / "sample"
    sizes = {file.name: len(file.read_bytes()) for file in folder.iterdir()}
    assert {"train.webp", "test.webp", "train.labels", "test.labels", "README.md"} <= sizes.keys()
    assert sum(sizes.values()) <= 10e6


def test_counts_and_balance(sample):
    assert sample.train.images.shape == (4000, 3, 32, 32)
    assert sample.test.images.shape == (1000, 3, 32, 32)
    assert sample.train.labels.bincount().tolist() == [400] * 10
    assert sample.test.labels.bincount().tolist() == [100] * 10
    assert len(sample.classes) == 10
    assert sample.owners is None


def test_images_are_real(sample):
    """Channel means and deviations are near those of all of CIFAR-10, and neighbouring pixels are alike."""
    for images in (sample.train.images, sample.test.images):
        pixels = images.double() / 255
        assert pixels.mean((0, 2, 3)).numpy() == pytest.approx([0.4914, 0.4822, 0.4465], abs=0.015)
        assert pixels.std((0, 2, 3)).numpy() == pytest.approx([0.2470, 0.2435, 0.2616], abs=0.015)
        across = (pixels[..., 1:] - pixels[..., :-1]).abs().mean()
        down = (pixels[..., 1:, :] - pixels[..., :-1, :]).abs().mean()
        assert max(across, down) < 0.08  # noise, or tiles in the wrong order, would give 0.2 and more


def test_first_training_images_are_the_official_ones(sample):
    """CIFAR-10 begins with a frog, two trucks, a deer and an automobile."""
    begin = ["frog", "truck", "truck", "deer", "automobile"]
    assert [sample.classes[label] for label in sample.train.labels[:5]] == begin
    frog = sample.train.images[0]
    assert frog[:, 0, 0].tolist() == [59, 62, 63]
    assert frog[0, 0, :4].tolist() == [59, 43, 50, 68]  # along the first row of the red plane
    assert [sample.classes[label] for label in sample.test.labels[:3]] == ["cat", "ship", "ship"]


def test_images_are_distinct(sample):
    everything = torch.cat([sample.train.images, sample.test.images]).flatten(1)
    assert len(everything.unique(dim=0)) == 5000


@pytest.mark.parametrize("size", [16, 48])
def test_other_sizes(size, sample):
    resized = load_dataset("sample", DataOptions(image_size=size))
    assert resized.train.images.shape == (4000, 3, size, size)
    assert resized.train.images.double().mean() == pytest.approx(sample.train.images.double().mean(), abs=0.5)


def test_resizing_keeps_flat_images_and_antialiases():
    flat = torch.full((3, 3, 32, 32), 200, dtype=torch.uint8)
    assert (resize_images(flat, 20, batch_size=2) == 200).all()
    board = ((torch.arange(32)[:, None] + torch.arange(32)) % 2 * 255).to(torch.uint8).expand(1, 3, 32, 32)
    assert resize_images(board, 8).float().std() < 20


def test_sheets_round_trip(tmp_path, sample):
    write_sheet(tmp_path, "small", sample.test.subset(torch.arange(200)))
    with Image.open(tmp_path / "small.webp") as sheet:
        pixels = np.asarray(sheet.convert("RGB"))
    assert pixels.shape == (64, 3200, 3)
    second_row_third_image = pixels[32:64, 64:96].transpose(2, 0, 1)
    assert np.array_equal(second_row_third_image, sample.test.images[102].numpy())
    assert list((tmp_path / "small.labels").read_bytes()) == sample.test.labels[:200].tolist()


def test_image_sets_check_themselves():
    images = torch.zeros(2, 3, 8, 8, dtype=torch.uint8)
    for wrong in (images.float(), images[:, :1], images[..., :4], images[0]):
        with pytest.raises(DataError, match="uint8"):
            ImageSet(wrong, None)
    with pytest.raises(DataError, match="one per image"):
        ImageSet(images, torch.zeros(3, dtype=torch.int64))
    subset = ImageSet(images, torch.tensor([5, 6])).subset(torch.tensor([1]))
    assert (len(subset), subset.labels.tolist()) == (1, [6])
    assert subset.to("cpu").labels.tolist() == [6]


def test_known_data_sets():
    assert {"cifar10", "cifar100", "folder", "sample"} <= set(datasets)
    with pytest.raises(UsageError, match="did you mean 'cifar10'"):
        load_dataset("cifar1O", DataOptions())


def test_for_tuning_a_share_of_the_training_images_takes_the_place_of_the_test_images(sample):
    tuning = load_dataset("sample", DataOptions(validation=0.2))
    count = len(sample.train)
    assert (len(tuning.train), len(tuning.test)) == (count - count // 5, count // 5)
    assert torch.bincount(tuning.test.labels).unique().numel() == 1  # as many of every class
    key = {image.numpy().tobytes() for image in sample.test.images}
    trained, judged = ({i.numpy().tobytes() for i in part.images} for part in (tuning.train, tuning.test))
    assert not trained & judged
    assert not key & (trained | judged)
    assert trained | judged == {i.numpy().tobytes() for i in sample.train.images}


def test_for_tuning_clients_keep_their_images(tmp_path):
    for client, images in (("a", 10), ("b", 20)):
        (tmp_path / client).mkdir()
        for i in range(images):
            colour = (i * 12, 0, 0) if client == "a" else (0, i * 12, 0)
            Image.new("RGB", (8, 8), colour).save(tmp_path / client / f"{i}.png")
    options = DataOptions(root=str(tmp_path), layout="clients", holdout=0, validation=0.5, image_size=8)
    dataset = load_dataset("folder", options)
    assert torch.bincount(dataset.owners).tolist() == [5, 10]
    red = dataset.train.images[:, 0].flatten(1).max(1).values > dataset.train.images[:, 1].flatten(1).max(1).values
    assert not red[dataset.owners == 1].any()
