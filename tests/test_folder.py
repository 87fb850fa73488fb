from __future__ import annotations

import logging
import os
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from fedu2.data import Dataset, load_dataset, make_partition
from fedu2.data import decode as decoder
from fedu2.data.decode import decode_image
from fedu2.data.holdout import held_out
from fedu2.errors import DataError, UsageError
from fedu2.experiment import Experiment
from fedu2.options import DataOptions


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("FEDU2_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "folder"


@pytest.fixture
def root(tmp_path) -> Path:
    path = tmp_path / "images"
    path.mkdir()
    return path


def paint(path: Path, colour=(200, 30, 30), size=(40, 40), mode="RGB", **options) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, colour).save(path, **options)
    return path


def load(root: Path, **options) -> Dataset:
    return load_dataset("folder", DataOptions(root=str(root), **{"holdout": 0.0, **options}))


def colour_of(pixels: np.ndarray) -> list[int]:
    """The colour in the middle of a (3, S, S) picture."""
    return pixels[:, pixels.shape[1] // 2, pixels.shape[2] // 2].tolist()


# --- layouts ---------------------------------------------------------------------------------------------------


def test_clients_without_classes(root):
    for client, shade in (("b", 10), ("a", 20), ("c", 30)):
        for i in range(3):
            paint(root / client / f"{i}.png", (shade + i,) * 3)
    dataset = load(root, layout="clients")
    assert dataset.client_names == ("a", "b", "c")
    assert dataset.owners.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert dataset.train.images[:, 0, 0, 0].tolist() == [20, 21, 22, 10, 11, 12, 30, 31, 32]
    assert dataset.train.labels is None
    assert dataset.classes == ()
    shares = make_partition(dataset, Experiment(clients=99))
    assert [share.tolist() for share in shares] == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]


def test_clients_with_classes(root):
    for name in ("a/dog/1", "a/cat/1", "b/dog/1", "b/dog/deeper/2", "b/emu/1"):
        paint(root / f"{name}.png")
    dataset = load(root, layout="clients")
    assert dataset.classes == ("cat", "dog", "emu")
    assert dataset.train.labels.tolist() == [0, 1, 1, 1, 2]
    assert dataset.owners.tolist() == [0, 0, 1, 1, 1]


def test_one_folder_with_and_without_classes(root):
    for i in range(4):
        paint(root / f"{i}.png")
    dataset = load(root, layout="images")
    assert (dataset.owners, dataset.train.labels, len(dataset.train)) == (None, None, 4)
    for i in range(4):
        (root / str(i % 2)).mkdir(exist_ok=True)
        (root / f"{i}.png").rename(root / str(i % 2) / f"{i}.png")
    dataset = load(root, layout="images")
    assert (dataset.owners, dataset.train.labels.tolist(), dataset.classes) == (None, [0, 0, 1, 1], ("0", "1"))


def test_auto_means_clients_when_there_are_subfolders(root, caplog):
    caplog.set_level(logging.INFO, "fedu2")
    paint(root / "1.png")
    assert load(root).owners is None
    (root / ".hidden").mkdir()
    assert load(root).owners is None
    assert "takes" in caplog.text
    paint(root / "a" / "1.png")
    dataset = load(root)
    assert dataset.client_names == ("a",)
    assert dataset.skipped == ("1.png: lies outside the clients' folders",)
    assert "as clients" in caplog.text


def test_other_files_are_ignored(root):
    paint(root / "a.PNG")
    paint(root / ".hidden.png")
    paint(root / "c" / ".hidden" / "x.png")
    paint(root / "c" / "x.png").rename(root / "c" / "picture without suffix")
    for name in ("notes.txt", "table.csv", "Thumbs.db", "paper.pdf"):
        (root / name).write_text("hello")
    dataset = load(root, layout="images")
    assert len(dataset.train) == 1
    assert dataset.skipped == ()


def test_a_loop_of_links_is_not_followed(root):
    paint(root / "a" / "dog" / "1.png")
    (root / "a" / "dog" / "again").symlink_to(root)
    assert len(load(root).train) == 1


def test_mistakes_are_explained(root, tmp_path):
    with pytest.raises(UsageError, match=r"data\.root=PATH"):
        load_dataset("folder", DataOptions())
    with pytest.raises(DataError, match="is not a directory"):
        load(tmp_path / "missing")
    with pytest.raises(DataError, match="holds no images"):
        load(root)
    paint(root / "1.png")
    with pytest.raises(DataError, match="one sub-folder per client"):
        load(root, layout="clients")
    paint(root / "a" / "1.png")
    (root / "empty").mkdir()
    (root / "notes only").mkdir()
    (root / "notes only" / "x.txt").write_text("hello")
    with pytest.raises(DataError, match="without images: empty, notes only;"):
        load(root)
    with pytest.raises(DataError, match=r"1\.png lies in no class folder"):
        load(root, layout="images")


# --- unreadable files ------------------------------------------------------------------------------------------


def png_chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png_of_size(width: int, height: int) -> bytes:
    """A tiny file that claims to be a picture of that size."""
    header = png_chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + png_chunk(b"IDAT", zlib.compress(b"")) + png_chunk(b"IEND", b"")


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_unreadable_files_are_listed_and_skipped(root, caplog):
    for i in range(3):
        paint(root / f"good{i}.jpg", quality=95)
    (root / "text.png").write_text("not an image")
    (root / "zero.jpg").touch()
    (root / "broken.jpg").symlink_to(root / "missing.jpg")
    os.mkfifo(root / "pipe.png")
    whole = Image.effect_noise((200, 200), 80).convert("RGB")
    whole.save(root / "cut.jpg", quality=95)
    (root / "cut.jpg").write_bytes((root / "cut.jpg").read_bytes()[:3000])
    (root / "large.png").write_bytes(png_of_size(10_000, 10_000))
    (root / "bomb.png").write_bytes(png_of_size(60_000, 60_000))
    (root / "script.png").write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n")
    (root / os.fsdecode(b"odd \xff name.png")).write_text("not an image")

    dataset = load(root)

    assert len(dataset.train) == 3
    names = [line.split(":")[0] for line in dataset.skipped]
    assert {
        "broken.jpg",
        "pipe.png",
        "text.png",
        "zero.jpg",
        "cut.jpg",
        "large.png",
        "bomb.png",
        "script.png",
        "odd \ufffd name.png",
    } <= set(names)
    reasons = dict(line.split(": ", 1) for line in dataset.skipped)
    assert "limit" in reasons["large.png"]
    assert "bomb" in reasons["bomb.png"]
    assert all(reasons.values())
    assert "are skipped" in caplog.text
    assert load(root).skipped == dataset.skipped  # from the cache
    "\n".join(dataset.skipped).encode()


def test_it_is_an_error_when_nothing_can_be_read(root):
    for i in range(2):
        (root / f"{i}.png").write_text("not an image")
    with pytest.raises(DataError, match="none of the 2 images"):
        load(root)
    paint(root / "a" / "1.png")
    (root / "b").mkdir()
    (root / "0.png").rename(root / "b" / "0.png")
    with pytest.raises(DataError, match="without readable images: b;"):
        load(root)


# --- pixels ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "mode", "colour", "expected"),
    [
        ("grey.png", "L", 77, [77, 77, 77]),
        ("bits.png", "1", 1, [255, 255, 255]),
        ("grey alpha.png", "LA", (0, 0), [255, 255, 255]),
        ("rgba.png", "RGBA", (255, 0, 0, 128), [255, 127, 127]),
        ("palette.gif", "P", 0, None),
        ("cmyk.tif", "CMYK", (0, 255, 255, 0), [255, 0, 0]),
        ("sixteen.png", "I;16", 40 * 257, [40, 40, 40]),
        ("sixteen.tif", "I;16", 40 * 257, [40, 40, 40]),
        ("float.tif", "F", 0.5, [0, 0, 0]),
        ("ycbcr.jpg", "YCbCr", (100, 128, 128), [100, 100, 100]),
        ("plain.bmp", "RGB", (1, 2, 3), [1, 2, 3]),
        ("plain.webp", "RGB", (200, 200, 200), [200, 200, 200]),
        ("plain.ppm", "RGB", (1, 2, 3), [1, 2, 3]),
        ("plain.jp2", "RGB", (90, 90, 90), [90, 90, 90]),
    ],
)
def test_modes_and_formats(name, mode, colour, expected, root):
    pixels = decode_image(paint(root / name, colour, (30, 50), mode), 32)
    assert (pixels.shape, pixels.dtype) == ((3, 32, 32), np.uint8)
    if expected is not None:
        assert colour_of(pixels) == pytest.approx(expected, abs=2)
    assert len(load(root).train) == 1


def test_transparent_palette_is_put_on_white(root):
    image = Image.new("P", (20, 20), 0)
    image.putpalette([10, 20, 30])
    image.save(root / "clear.png", transparency=0)
    assert colour_of(decode_image(root / "clear.png", 16)) == [255, 255, 255]


def test_sixteen_bits_keep_their_scale_and_floats_are_stretched(root):
    ramp = np.linspace(0, 1, 32)[None].repeat(32, 0)
    Image.fromarray((ramp * 32767).astype(np.uint16)).save(root / "ramp.png")
    Image.fromarray((ramp * 5 - 2).astype(np.float32)).save(root / "ramp.tif")
    assert decode_image(root / "ramp.png", 32)[0, 0, [0, -1]].tolist() == pytest.approx([0, 127], abs=1)
    assert decode_image(root / "ramp.tif", 32)[0, 0, [0, -1]].tolist() == [0, 255]


def test_first_frame_of_an_animation(root):
    frames = [Image.new("RGB", (16, 16), colour) for colour in ("red", "blue")]
    frames[0].save(root / "moving.gif", save_all=True, append_images=frames[1:])
    assert colour_of(decode_image(root / "moving.gif", 16)) == [255, 0, 0]


def test_exif_orientation_is_applied(root):
    pixels = np.zeros((32, 32, 3), np.uint8)
    pixels[:16] = 255  # bright on top
    exif = Image.Exif()
    exif[0x0112] = 3  # the camera was upside down
    Image.fromarray(pixels).save(root / "turned.png", exif=exif)
    decoded = decode_image(root / "turned.png", 32)
    assert decoded[:, :15].max() < 10
    assert decoded[:, 17:].min() > 245


@pytest.mark.parametrize("name", ["wide.png", "wide.jpg"])
def test_shorter_side_is_scaled_and_the_centre_cut_out(name, root):
    pixels = np.zeros((64, 192, 3), np.uint8)
    pixels[:, 64:128] = (10, 200, 30)  # the middle third is what remains
    Image.fromarray(pixels).save(root / name)
    decoded = decode_image(root / name, 32)
    assert np.abs(decoded[:, :, 2:-2].astype(int) - np.array([10, 200, 30])[:, None, None]).max() <= 12


def test_shrinking_a_large_jpeg_is_antialiased(root):
    board = (np.indices((1024, 1024)).sum(0) % 2 * 255).astype(np.uint8)
    Image.fromarray(board).save(root / "board.jpg", quality=95)
    decoded = decode_image(root / "board.jpg", 32)
    assert decoded.std() < 10
    assert decoded.mean() == pytest.approx(127, abs=6)


@pytest.mark.parametrize("size", [(1, 1), (1, 5000), (5000, 1), (3, 2), (8, 512)])
def test_odd_shapes(size, root):
    assert colour_of(decode_image(paint(root / "odd.png", (9, 8, 7), size), 32)) == [9, 8, 7]


def test_image_size(root):
    paint(root / "1.png")
    assert load(root, image_size=64).train.images.shape == (1, 3, 64, 64)


# --- cache -----------------------------------------------------------------------------------------------------


@pytest.fixture
def decoded(monkeypatch) -> list[int]:
    """How many files each decoding run had: empty while the cache serves."""
    runs: list[int] = []
    original = decoder.decode_files
    monkeypatch.setattr(decoder, "decode_files", lambda paths, size: runs.append(len(paths)) or original(paths, size))
    return runs


def test_images_are_decoded_once(root, cache, decoded):
    for i in range(3):
        paint(root / f"{i}.bmp", (i, i, i))  # all of one size in bytes
    first = load(root)
    again = load(root)
    assert decoded == [3]
    assert again.train.images.equal(first.train.images)

    paint(root / "1.bmp", (99, 99, 99))
    os.utime(root / "1.bmp", ns=(1, 1))
    assert load(root).train.images[1, 0, 0, 0] == 99
    (root / "2.bmp").rename(root / "3.bmp")
    load(root)
    load(root, image_size=16)
    load(root)
    assert decoded == [3, 3, 3, 3]
    assert len(list(cache.iterdir())) == 2  # one file for each size


@pytest.mark.parametrize("damage", ["cut", "pixel", "empty", "text"])
def test_a_damaged_cache_is_made_anew(damage, root, cache, decoded):
    paint(root / "1.png")
    (root / "2.png").write_text("not an image")
    first = load(root)
    (file,) = cache.iterdir()
    blob = bytearray(file.read_bytes())
    blob[-1] ^= 1
    file.write_bytes({"cut": blob[:-100], "pixel": blob, "empty": b"", "text": b"hello" * 99}[damage])
    again = load(root)
    assert again.train.images.equal(first.train.images)
    assert again.skipped == first.skipped
    load(root)
    assert decoded == [2, 2]


def test_works_without_a_cache(root, tmp_path, monkeypatch, caplog):
    (tmp_path / "file").touch()
    monkeypatch.setenv("FEDU2_CACHE", str(tmp_path / "file"))
    paint(root / "1.png")
    assert len(load(root).train) == 1
    assert "not cached" in caplog.text


# --- holdout ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [0.0, 0.1, 0.25, 0.5, 0.9])
def test_holdout_is_stratified(share):
    rng = np.random.default_rng(0)
    owners = torch.from_numpy(rng.integers(5, size=1000))
    labels = torch.from_numpy(rng.integers(4, size=1000))
    chosen = held_out(owners, labels, share)
    assert chosen.sum() == round(1000 * share)
    for client in range(5):
        for label in range(4):
            group = chosen[(owners == client) & (labels == label)]
            assert abs(group.sum() - share * len(group)) <= 1
    assert chosen.equal(held_out(owners, labels, share))


def test_holdout_leaves_every_client_an_image():
    owners = torch.arange(50)
    chosen = held_out(owners, None, 0.5)
    assert not chosen.any()
    assert (~held_out(torch.arange(50) // 2, None, 0.99)).sum() == 25


def test_holdout_becomes_the_test_set(root):
    for client in "ab":
        for i in range(10):
            paint(root / client / "x" / f"{i}.png", (i, i, i))
    dataset = load(root, holdout=0.2)
    assert (len(dataset.train), len(dataset.test)) == (16, 4)
    assert dataset.owners.bincount().tolist() == [8, 8]
    assert dataset.test.labels.tolist() == [0] * 4
    for client in (0, 1):
        train = set(dataset.train.images[dataset.owners == client][:, 0, 0, 0].tolist())
        assert len(train) == 8
    assert len(load(root, holdout=0.0).test) == 0
