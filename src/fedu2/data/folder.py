"""The user's own images: `dataset=folder data.root=PATH`.

    layout clients                    layout images, classes known      layout images, classes unknown
    root/hospital_a/scan.png          root/cat/tom.jpg                  root/a.png
    root/hospital_b/cat/tom.jpg       root/dog/rex.jpg                  root/b.png
         client     class                  class

`data.layout=auto` means clients when the root has sub-folders, else images, and says so in the log. Folders below the
last level named above are searched too. Names that begin with a dot are ignored, and so are files that do not end
like pictures (notes, tables); a file that ends like one and cannot be read is skipped with a warning. Classes are
given for all images or for none. `data.holdout` of the images of every client and class become the test set.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from fedu2.data.base import Dataset, ImageSet, datasets
from fedu2.data.decode import decode_cached, looks_like_image
from fedu2.data.holdout import held_out
from fedu2.errors import DataError, UsageError
from fedu2.files import shown, user_path
from fedu2.options import DataOptions

__all__ = ["Picture", "load_folder", "scan"]

log = logging.getLogger("fedu2")


@dataclass(frozen=True)
class Picture:
    """A file that ends like a picture, with the folders that say whose and what it is."""

    path: Path
    client: str | None
    label: str | None


@datasets.register("folder")
def load_folder(options: DataOptions) -> Dataset:
    """Images of a directory; in layout clients they come with their owners."""
    root = _root(options)
    layout = _layout(root, options.layout)
    clients = [folder.name for folder in _subfolders(root)] if layout == "clients" else []
    found = scan(root, layout)
    _require_all(clients, found, f"client folders of {root} without images")
    if not found:
        raise DataError(f"{root} holds no images")

    images, reasons = decode_cached(root, [picture.path for picture in found], options.image_size)
    skipped = _skipped(root, layout, found, reasons)
    pictures = [picture for position, picture in enumerate(found) if position not in reasons]
    if not pictures:
        raise DataError(f"none of the {len(found)} images in {root} can be read; the first: {skipped[0]}")
    _require_all(clients, pictures, f"client folders of {root} without readable images")

    classes, labels = _labels(pictures)
    number = {client: i for i, client in enumerate(clients)}
    owners = torch.tensor([number.get(picture.client or "", 0) for picture in pictures])
    test = held_out(owners, labels, options.holdout)
    everything = ImageSet(images, labels)
    return Dataset(
        name="folder",
        train=everything.subset((~test).nonzero().flatten()),
        test=everything.subset(test.nonzero().flatten()),
        classes=classes,
        owners=owners[~test] if clients else None,
        client_names=tuple(map(shown, clients)),
        skipped=tuple(skipped),
    )


def _root(options: DataOptions) -> Path:
    if options.root is None:
        raise UsageError("dataset=folder needs the directory with your images: data.root=PATH")
    root = user_path(options.root).resolve()
    if not root.is_dir():
        raise DataError(f"data.root={options.root} is not a directory")
    return root


def _layout(root: Path, layout: str) -> str:
    if layout == "clients" and not _subfolders(root):
        raise DataError(f"data.layout=clients needs one sub-folder per client, and {root} has none")
    if layout != "auto":
        return layout
    chosen = "clients" if _subfolders(root) else "images"
    other = "images would take its sub-folders as classes" if chosen == "clients" else "it has no sub-folders"
    log.info("data.layout=auto takes %s as %s (%s)", root, chosen, other)
    return chosen


def _subfolders(folder: Path) -> list[Path]:
    """Links may lead anywhere but back: to the folder itself, or to one that it lies in."""
    above = {folder.resolve(), *folder.resolve().parents}
    return [path for path in _visible(folder) if path.is_dir() and not (path.is_symlink() and path.resolve() in above)]


def _visible(folder: Path) -> list[Path]:
    try:
        return sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    except OSError as error:
        raise DataError(f"{shown(folder)} cannot be read ({error})") from error


def scan(root: Path, layout: str) -> list[Picture]:
    """The pictures in `root` by client, class and path; `layout` is clients or images."""
    if layout == "clients":
        return [picture for folder in _subfolders(root) for picture in _scan_classes(folder, folder.name)]
    return _scan_classes(root, None)


def _scan_classes(folder: Path, client: str | None) -> list[Picture]:
    plain = [Picture(path, client, None) for path in _visible(folder) if not path.is_dir() and looks_like_image(path)]
    in_classes = [Picture(path, client, sub.name) for sub in _subfolders(folder) for path in _pictures_below(sub)]
    return plain + in_classes


def _pictures_below(folder: Path) -> list[Path]:
    found = []
    for parent, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        found += [Path(parent, name) for name in files if not name.startswith(".")]
    return sorted(path for path in found if looks_like_image(path))


def _require_all(clients: list[str], pictures: list[Picture], complaint: str) -> None:
    present = {picture.client for picture in pictures}
    if empty := [client for client in clients if client not in present]:
        raise DataError(f"{complaint}: {', '.join(shown(name) for name in empty)}; fill or remove them")


def _skipped(root: Path, layout: str, found: list[Picture], reasons: dict[int, str]) -> list[str]:
    lines = [f"{shown(found[i].path.relative_to(root))}: {reason}" for i, reason in reasons.items()]
    if layout == "clients":
        stray = [path for path in _visible(root) if path.is_file() and looks_like_image(path)]
        lines += [f"{shown(path.name)}: lies outside the clients' folders" for path in stray]
    if lines:
        more = "; …" if len(lines) > 5 else ""
        log.warning("%d images in %s are skipped: %s%s", len(lines), root, "; ".join(lines[:5]), more)
    return lines


def _labels(pictures: list[Picture]) -> tuple[tuple[str, ...], Tensor | None]:
    labels = [picture.label for picture in pictures if picture.label is not None]
    if not labels:
        return (), None
    if bare := [picture.path for picture in pictures if picture.label is None]:
        raise DataError(
            f"{shown(bare[0])} lies in no class folder while other images do: "
            "put every image into a class folder, or none"
        )
    names = sorted(set(labels))
    number = {name: i for i, name in enumerate(names)}
    return tuple(map(shown, names)), torch.tensor([number[label] for label in labels])
