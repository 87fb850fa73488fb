from __future__ import annotations

import gzip
import hashlib
import io
import os
import pickle
import struct
import tarfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from fedu2.data import cifar, load_dataset
from fedu2.data.archives import read_archive
from fedu2.data.cifar import CIFAR10, CIFAR100, Release, find_release, read_release
from fedu2.data.download import download
from fedu2.data.safe_pickle import UnsafePickleError, load_plain
from fedu2.errors import DataError
from fedu2.options import DataOptions

IMAGES = 7  # in each file of the small releases made here
RELEASES = {release.folder: replace(release, images=(IMAGES, IMAGES)) for release in CIFAR10 + CIFAR100}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("FEDU2_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def python2_pickle(value) -> bytes:
    """`value` as Python 2's cPickle wrote it in protocol 2: strings are byte strings, arrays carry one."""

    def encode(value) -> bytes:
        if isinstance(value, dict):
            return b"}(" + b"".join(encode(k) + encode(v) for k, v in value.items()) + b"u"
        if isinstance(value, list):
            return b"](" + b"".join(map(encode, value)) + b"e"
        if isinstance(value, int):
            return b"K" + bytes([value])
        if isinstance(value, bytes):
            return b"T" + struct.pack("<i", len(value)) + value
        shape = b"".join(b"M" + struct.pack("<H", side) for side in value.shape) + b"\x86"
        dtype = b"cnumpy\ndtype\n" + encode(b"u1") + b"K\x00K\x01\x87R"
        dtype += b"(K\x03" + encode(b"|") + b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
        made = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85" + encode(b"b") + b"\x87R"
        return made + b"(K\x01" + shape + dtype + b"\x89" + encode(value.tobytes()) + b"tb"

    return b"\x80\x02" + encode(value) + b"."


def make_files(release: Release) -> tuple[dict[str, bytes], dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Random files of a release, with the images (N, 3072) and labels that are in each."""
    rng = np.random.default_rng(len(release.folder))
    files, images, labels = {}, {}, {}
    for name in release.files:
        x = images[name] = rng.integers(256, size=(IMAGES, 3072), dtype=np.uint8)
        y = labels[name] = rng.integers(release.classes, size=IMAGES, dtype=np.uint8)
        coarse = rng.integers(20, size=IMAGES, dtype=np.uint8)
        if name.endswith(".bin"):
            columns = [y[:, None], x] if release.classes == 10 else [coarse[:, None], y[:, None], x]
            files[name] = np.concatenate(columns, axis=1).tobytes()
        else:
            content = {b"batch_label": b"x", b"data": x, b"filenames": [b"a.png"] * IMAGES}
            if release.classes == 10:
                content[b"labels"] = y.tolist()
            else:
                content |= {b"coarse_labels": coarse.tolist(), b"fine_labels": y.tolist()}
            files[name] = python2_pickle(content)
    return files, images, labels


def write_folder(root: Path, release: Release, files: dict[str, bytes]) -> Path:
    folder = root / release.folder
    folder.mkdir(parents=True)
    for name, blob in files.items():
        (folder / name).write_bytes(blob)
    return folder


def write_archive(root: Path, release: Release, members: dict[str, bytes]) -> Path:
    root.mkdir(parents=True, exist_ok=True)
    with tarfile.open(root / release.archive, "w:gz", compresslevel=1) as tar:
        for name, blob in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(blob)
            tar.addfile(info, io.BytesIO(blob))
    return root / release.archive


def members_of(release: Release, files: dict[str, bytes]) -> dict[str, bytes]:
    return {f"{release.folder}/{name}": blob for name, blob in files.items()}


@pytest.fixture(params=RELEASES)
def release(request) -> Release:
    return RELEASES[request.param]


@pytest.mark.parametrize("packed", [False, True])
def test_reads_every_release_in_official_order(release, packed, tmp_path):
    files, images, labels = make_files(release)
    shuffled = dict(sorted(files.items(), reverse=True))  # archives list their members in any order
    if packed:
        source = write_archive(tmp_path, release, members_of(release, shuffled) | {"other.txt": b"hello"})
    else:
        source = write_folder(tmp_path, release, shuffled)

    train, test = read_release(source, release)

    expected = np.concatenate([images[name] for name in release.train]).reshape(-1, 3, 32, 32)
    assert np.array_equal(train.images.numpy(), expected)
    assert train.labels.tolist() == [y for name in release.train for y in labels[name].tolist()]
    assert np.array_equal(test.images.numpy(), images[release.test].reshape(-1, 3, 32, 32))
    assert test.labels.tolist() == labels[release.test].tolist()
    assert train.labels.dtype == torch.int64


def test_handmade_pickles_are_what_pickle_reads():
    """The test's own Python 2 pickler is right: the standard library and NumPy understand it as intended."""
    array = np.arange(12, dtype=np.uint8).reshape(3, 4)
    content = pickle.loads(python2_pickle({b"data": array, b"labels": [1, 2]}), encoding="bytes")
    assert np.array_equal(content[b"data"], array)
    assert content[b"labels"] == [1, 2]


def test_reads_pickles_of_python3():
    array = np.arange(12, dtype=np.uint8).reshape(3, 4)
    content = load_plain(pickle.dumps({b"data": array, "labels": [1, 2]}, protocol=2))
    assert np.array_equal(content[b"data"], array)
    assert content["labels"] == [1, 2]


class Shell:
    def __reduce__(self):
        return os.system, ("exit 1",)


HUGE = b"\x80\x02cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nJ\xff\xff\xff\x7f\x85U\x01b\x87R."
HOSTILE = {
    "shell": pickle.dumps(Shell(), protocol=2),
    "shell, new protocol": pickle.dumps(Shell(), protocol=4),
    "eval": b"\x80\x02c__builtin__\neval\nU\x011\x85R.",
    "numpy.load": b"\x80\x02cnumpy\nload\nU\x01x\x85R.",
    "other codec": b"\x80\x02c_codecs\nencode\nX\x01\x00\x00\x00aX\x0a\x00\x00\x00zlib_codec\x86R.",
    "object array": pickle.dumps(np.array([1, "a"], dtype=object), protocol=2),
    "huge memo": b"\x80\x02Nr\xff\xff\xff\x7f.",
    "huge array": HUGE,
    "self-containing": b"\x80\x02]q\x00h\x00a.",
    "shape mismatch": python2_pickle({b"data": np.zeros((2, 3), np.uint8)}).replace(b"M\x02\x00", b"M\x09\x00"),
    "truncated": python2_pickle({b"data": np.zeros((2, 3), np.uint8)})[:-30],
    "not a pickle": b"hello",
    "empty": b"",
}


@pytest.mark.parametrize("blob", HOSTILE.values(), ids=HOSTILE.keys())
def test_refuses_hostile_and_damaged_pickles(blob, tmp_path):
    with pytest.raises(UnsafePickleError):
        load_plain(blob)
    release = RELEASES["cifar-10-batches-py"]
    files = make_files(release)[0] | {"data_batch_3": blob}
    with pytest.raises(DataError, match=r"data_batch_3 in .*cifar-10-batches-py is damaged"):
        read_release(write_folder(tmp_path, release, files), release)


def test_a_pickle_never_calls_what_it_names(tmp_path):
    target = tmp_path / "touched"

    class Touch:
        def __reduce__(self):
            return Path.touch, (target,)

    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        with pytest.raises(UnsafePickleError):
            load_plain(pickle.dumps({"data": Touch()}, protocol=protocol))
    assert not target.exists()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda blob: blob[:-1], "not a whole number of records"),
        (lambda blob: blob[:-3074] if len(blob) % 3074 == 0 else blob[:-3073], "6 images and 6 labels instead of 7"),
        (lambda blob: b"", "0 bytes"),
        (lambda blob: b"\xff\xff" + blob[2:], "label 255"),
    ],
)
@pytest.mark.parametrize("folder", ["cifar-10-batches-bin", "cifar-100-binary"])
def test_damaged_binary_files_are_named(folder, damage, message, tmp_path):
    release = RELEASES[folder]
    files = make_files(release)[0]
    files[release.test] = damage(files[release.test])
    with pytest.raises(DataError, match=f"{release.test} in .*{message}"):
        read_release(write_folder(tmp_path, release, files), release)


def test_missing_files_are_named(tmp_path):
    release = RELEASES["cifar-10-batches-bin"]
    files = make_files(release)[0]
    del files["data_batch_2.bin"], files["test_batch.bin"]
    for source in (
        write_folder(tmp_path / "a", release, files),
        write_archive(tmp_path / "b", release, members_of(release, files)),
    ):
        with pytest.raises(DataError, match=r"incomplete: data_batch_2\.bin, test_batch\.bin is missing"):
            read_release(source, release)


@pytest.mark.parametrize("keep", [0, 1, 20, 0.5, 0.99, -4])
def test_truncated_archives_are_named(keep, tmp_path):
    release = RELEASES["cifar-100-binary"]
    archive = write_archive(tmp_path, release, members_of(release, make_files(release)[0]))
    blob = archive.read_bytes()
    archive.write_bytes(blob[: int(keep * len(blob)) if isinstance(keep, float) else keep])
    with pytest.raises(DataError, match=r"cifar-100-binary\.tar\.gz"):
        read_release(archive, release)


def test_a_flipped_bit_in_an_archive_is_noticed(tmp_path):
    release = RELEASES["cifar-100-binary"]
    archive = write_archive(tmp_path, release, members_of(release, make_files(release)[0]))
    blob = bytearray(archive.read_bytes())
    blob[len(blob) // 2] ^= 4
    archive.write_bytes(blob)
    with pytest.raises(DataError, match=r"cifar-100-binary\.tar\.gz is damaged"):
        read_release(archive, release)


def test_members_are_matched_by_full_name_and_never_written(tmp_path):
    release = RELEASES["cifar-10-batches-bin"]
    files = make_files(release)[0]
    evil = {f"../{name}": b"evil" for name in files} | {f"/tmp/{release.folder}/{name}": b"evil" for name in files}
    evil |= {f"{release.folder}/../{name}": b"evil" for name in files}
    for number, (name, blob) in enumerate(evil.items()):
        archive = write_archive(tmp_path / f"evil-{number}", release, members_of(release, files) | {name: blob})
        with pytest.raises(DataError, match="leads out of the archive"):
            read_release(archive, release)
    others = {f"other/{name}": b"other" for name in files} | {f"a/{release.folder}/{name}": b"other" for name in files}
    archive = write_archive(tmp_path / "in", release, others | members_of(release, files))
    assert len(read_release(archive, release)[0]) == 5 * IMAGES
    assert {path.name for path in tmp_path.rglob("*") if path.is_file()} == {archive.name}
    only_others = write_archive(tmp_path / "others", release, others)
    with pytest.raises(DataError, match="incomplete"):
        read_release(only_others, release)


def test_links_in_archives_are_not_followed(tmp_path):
    release = RELEASES["cifar-100-binary"]
    secret = tmp_path / "secret"
    secret.write_text("secret")
    with tarfile.open(tmp_path / release.archive, "w:gz") as tar:
        for name in release.files:
            link = tarfile.TarInfo(f"{release.folder}/{name}")
            link.type, link.linkname = tarfile.SYMTYPE, str(secret)
            tar.addfile(link)
    with pytest.raises(DataError, match="incomplete"):
        read_release(tmp_path / release.archive, release)


def test_archives_that_unpack_without_end_are_refused(tmp_path):
    path = tmp_path / "bomb.tar.gz"
    header = tarfile.TarInfo("padding")
    header.size = 40 << 20
    with gzip.open(path, "wb", compresslevel=9) as file:
        file.write(header.tobuf())
        for _ in range(40):
            file.write(bytes(1 << 20))
    assert path.stat().st_size < 1 << 20
    with pytest.raises(DataError, match="unpacks to more than"):
        list(read_archive(path, "folder", ["x"], max_file=1 << 20, max_total=8 << 20))


def test_members_that_claim_too_much_are_refused(tmp_path):
    path = tmp_path / "large.tar.gz"
    header = tarfile.TarInfo("folder/x")
    header.size = 1 << 40
    with gzip.open(path, "wb") as file:
        file.write(header.tobuf(tarfile.GNU_FORMAT))
    with pytest.raises(DataError, match="folder/x is larger than"):
        list(read_archive(path, "folder", ["x"], max_file=1 << 20, max_total=8 << 20))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("where", ["root", "below", "itself", "cache"])
def test_data_are_found(where, packed, release, tmp_path, cache):
    files = make_files(release)[0]
    place = {"root": "r", "below": "r/sub", "itself": "r", "cache": "cache"}[where]
    if packed:
        source = write_archive(tmp_path / place, release, members_of(release, files))
    else:
        source = write_folder(tmp_path / place, release, files)
    root = {"itself": source, "cache": None}.get(where, tmp_path / "r")
    assert find_release(tuple(RELEASES.values()), root) == (source, release)


def test_a_renamed_folder_is_found(tmp_path):
    release = RELEASES["cifar-10-batches-bin"]
    folder = write_folder(tmp_path, release, make_files(release)[0]).rename(tmp_path / "my data")
    assert find_release(CIFAR10, folder) == (folder, CIFAR10[0])


def test_missing_data_name_what_is_expected_and_where(tmp_path, cache, monkeypatch):
    monkeypatch.setattr(cifar, "HOME", (tmp_path / "nowhere").as_uri() + "/")
    for download_allowed, reason in ((False, "data.download is off"), (True, "could not be downloaded")):
        with pytest.raises(DataError) as caught:
            load_dataset("cifar100", DataOptions(root=str(tmp_path), download=download_allowed))
        text = str(caught.value)
        for part in ("cifar-100-binary.tar.gz", "cifar-100-python", str(tmp_path), str(cache), reason):
            assert part in text
        assert "\n" not in text
    with pytest.raises(DataError, match="missing does not exist"):
        load_dataset("cifar10", DataOptions(root=str(tmp_path / "missing")))


def test_a_missing_archive_is_downloaded_to_the_cache(tmp_path, cache, monkeypatch):
    release = RELEASES["cifar-10-batches-bin"]
    archive = write_archive(tmp_path / "server", release, members_of(release, make_files(release)[0]))
    served = replace(release, md5=hashlib.md5(archive.read_bytes()).hexdigest())
    monkeypatch.setattr(cifar, "HOME", archive.parent.as_uri() + "/")
    monkeypatch.setattr(cifar, "CIFAR10", (served,))
    dataset = load_dataset("cifar10", DataOptions())
    assert (len(dataset.train), len(dataset.test)) == (5 * IMAGES, IMAGES)
    assert [path.name for path in cache.iterdir()] == [release.archive]
    archive.unlink()
    assert len(load_dataset("cifar10", DataOptions()).train) == 5 * IMAGES  # from the cache


def test_downloads_arrive_whole_or_not_at_all(tmp_path):
    source, target = tmp_path / "source", tmp_path / "to" / "target"
    source.write_bytes(b"content" * 1000)
    with pytest.raises(DataError, match="MD5"):
        download(source.as_uri(), target, "0" * 32)
    with pytest.raises(DataError, match="larger than"):
        download(source.as_uri(), target, "0" * 32, max_bytes=10)
    assert list(target.parent.iterdir()) == []
    seen = []
    md5 = hashlib.md5(source.read_bytes()).hexdigest()
    download(source.as_uri(), target, md5, progress=lambda done, total: seen.append((done, total)))
    assert target.read_bytes() == source.read_bytes()
    assert seen[-1] == (7000, 7000)


def test_official_releases_have_official_sizes(tmp_path):
    """A folder with too few images is refused under the official name: results would not be on CIFAR-10."""
    write_folder(tmp_path, CIFAR10[0], make_files(RELEASES["cifar-10-batches-bin"])[0])
    with pytest.raises(DataError, match="instead of 10,000"):
        load_dataset("cifar10", DataOptions(root=str(tmp_path)))


def test_loads_a_full_size_data_set(tmp_path):
    labels = (np.arange(10_000) % 10).astype(np.uint8)
    blob = np.concatenate([labels[:, None], np.zeros((10_000, 3072), np.uint8)], axis=1).tobytes()
    write_folder(tmp_path, CIFAR10[0], dict.fromkeys(CIFAR10[0].files, blob))
    dataset = load_dataset("cifar10", DataOptions(root=str(tmp_path), download=False))
    assert dataset.train.images.shape == (50_000, 3, 32, 32)
    assert dataset.train.labels.bincount().tolist() == [5_000] * 10
    assert len(dataset.test) == 10_000
    assert dataset.classes[0] == "airplane"


def test_class_names():
    assert len(cifar.CIFAR10_CLASSES) == 10
    assert len(cifar.CIFAR100_CLASSES) == 100
    assert list(cifar.CIFAR100_CLASSES) == sorted(set(cifar.CIFAR100_CLASSES))
