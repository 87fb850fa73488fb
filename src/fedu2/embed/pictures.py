"""Which pictures are meant: a folder, one image, a list of paths, standard input."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from fedu2.data.decode import looks_like_image
from fedu2.data.folder import scan
from fedu2.errors import DataError
from fedu2.files import read_within, shown, user_path

__all__ = ["Images", "Picture", "find"]

Images = str | Path | Iterable[str | Path]


class Picture(NamedTuple):
    """name: what the result calls it, as the user does; path: where it is read."""

    name: str
    path: Path


def find(images: Images) -> list[Picture]:
    """The pictures that `images` stands for, in order.

    A folder: all below it that end like pictures, sorted, called by their paths inside it; names that begin with a dot
    are passed over.  A file that ends like a picture: itself.  Any other file, or `-` for standard input: a list with
    one path a line, relative to the list's folder.  In Python also the paths themselves.
    """
    if not isinstance(images, str | Path):
        found = [Picture(os.fspath(path), user_path(path)) for path in images]
    elif str(images) == "-":
        found = _listed(read_within(sys.stdin.buffer), Path.cwd(), "standard input")
    else:
        found = _at(user_path(images))
    if not found:
        raise DataError(f"{'the list' if not isinstance(images, str | Path) else shown(images)} names no images")
    return found


def _at(path: Path) -> list[Picture]:
    if not path.exists():
        raise DataError(f"{shown(path)} does not exist")
    if path.is_dir():
        below = sorted(picture.path for picture in scan(path, "images"))
        return [Picture(str(file.relative_to(path)), file) for file in below]
    if looks_like_image(path):
        return [Picture(path.name, path)]
    folder = path.parent if path.is_file() else Path.cwd()  # a pipe, as in <(find ...), has no folder to speak of
    with path.open("rb") as file:
        return _listed(read_within(file), folder, shown(path))


def _listed(text: bytes, folder: Path, where: str) -> list[Picture]:
    """File names are bytes, so that lists are; what is no text is taken as it is."""
    if b"\0" in text:
        raise DataError(f"{where} is no list of paths, one a line (and no picture by its ending)")
    lines = (line.rstrip(b"\r") for line in text.removeprefix(b"\xef\xbb\xbf").split(b"\n"))
    names = [os.fsdecode(line) for line in lines if line.strip()]
    return [Picture(name, folder / user_path(name)) for name in names]
