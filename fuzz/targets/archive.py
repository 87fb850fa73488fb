"""CIFAR archives. Inputs are tar files, packed here, or archives as they are; releases have two images a file."""

from __future__ import annotations

import gzip
import io
import pickle
import tarfile
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from fedu2.data.cifar import CIFAR10, CIFAR100, PIXELS, Release, read_release

__all__ = ["RELEASES", "hostile", "one_input", "seeds"]

RELEASES = [replace(release, images=(2, 2)) for release in (*CIFAR10, *CIFAR100)]


def seeds() -> list[bytes]:
    """A whole archive of each release, one packed, and two with names that lead elsewhere."""
    whole = [_tar({f"{release.folder}/{name}": content for name, content in files(release).items()}) for release in
             RELEASES]  # fmt: skip
    strange = _tar({"../../etc/passwd": b"x", f"{RELEASES[0].folder}/../../x": b"x", "/etc/passwd": b"x"})
    return [*whole, gzip.compress(whole[0]), strange]


def files(release: Release) -> dict[str, bytes]:
    """Valid content for each file of a release."""
    images = np.arange(2 * PIXELS, dtype=np.uint8).reshape(2, PIXELS)
    label_bytes = 2 if release.classes == 100 else 1
    binary = b"".join(bytes([1] * label_bytes) + image.tobytes() for image in images)
    pickled = pickle.dumps({"data": images, "labels": [1, 2], "fine_labels": [1, 2]}, protocol=2)
    return dict.fromkeys(release.files, binary if "bin" in release.archive else pickled)


def hostile() -> list[bytes]:
    """Bombs, and headers that go on without end."""
    release = RELEASES[2]
    bomb = tarfile.TarInfo(f"{release.folder}/{release.test}")
    bomb.size = 201 << 20
    long = tarfile.TarInfo("././@LongLink")
    long.type, long.size = tarfile.GNUTYPE_LONGNAME, 512
    pax = tarfile.TarInfo("./PaxHeaders/x")
    pax.type, pax.size = tarfile.XHDTYPE, 1 << 16
    zeros = io.BytesIO()
    with gzip.open(zeros, "wb", 1) as file:
        for header in (tarfile.TarInfo("a"), bomb):
            file.write(header.tobuf())
        for _ in range(201):
            file.write(bytes(1 << 20))
    chain = (long.tobuf() + b"a" * 512) * 3000
    return [zeros.getvalue(), chain, pax.tobuf() + b"1" * (1 << 16), gzip.compress(b"\1" * (201 << 20), 1)]


def _tar(members: dict[str, bytes]) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return packed.getvalue()


def one_input(data: bytes) -> None:
    """Read as the release whose folder is named first."""
    release = next((r for r in RELEASES if r.folder.encode() in data[:512]), RELEASES[0])
    with TemporaryDirectory() as folder:
        path = Path(folder, release.archive)
        path.write_bytes(data if data.startswith(b"\x1f\x8b") else gzip.compress(data, 1))
        read_release(path, release)
