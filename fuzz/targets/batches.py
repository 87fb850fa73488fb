"""Unpacked CIFAR files: binary records and pickles."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

from fedu2.data.cifar import read_release
from fuzz.targets.archive import RELEASES, files

__all__ = ["hostile", "one_input", "seeds"]


def seeds() -> list[bytes]:
    """A file of each release, with its number in front."""
    return [bytes([number]) + next(iter(files(release).values())) for number, release in enumerate(RELEASES)]


def hostile() -> list[bytes]:
    """Pickles that make much of little: objects, copies of an array, a text encoded again and again, lists of lists."""
    header, python = b"\x80\x02", bytes([1])
    text = b"X" + (60_000).to_bytes(4, "little") + b"a" * 60_000
    made = b"cnumpy.core.multiarray\n_reconstruct\n)R(K\x01M\x60\xea\x85cnumpy\ndtype\nU\x02u1\x85R\x89"
    lists = b"](" + b"N" * 20_000 + b"eq\x00" + b"".join(
        b"](" + b"h" + bytes([n]) * 1 + (b"h" + bytes([n])) * 5_000 + b"eq" + bytes([n + 1]) for n in range(3)
    )  # fmt: skip
    pickles = [
        b"]" * 4_000_000,
        b"(" + b"]" * 2_000_000 + b"l.",
        b"c_codecs\nencode\nq\x00(" + text + b"U\x06latin1tq\x01(" + b"h\x00h\x01R" * 30_000 + b"t.",
        made + text + b"tbq\x00(" + b"h\x00" * 100_000 + b"t.",
        lists + b".",
        b"}(" + b"".join(b"\x8a\x0a" + (n * (2**61 - 1)).to_bytes(10, "little") + b"N" for n in range(60_000)) + b"u.",
        b"cos\nsystem\nU\x02ls\x85R.",
    ]
    return [python + header + pickle for pickle in pickles]


def one_input(data: bytes) -> None:
    """Every file of the release is the input."""
    release = RELEASES[data[0] % len(RELEASES)] if data else RELEASES[0]
    with TemporaryDirectory() as folder:
        for name in release.files:
            Path(folder, name).write_bytes(data[1:])
        read_release(Path(folder), release)
