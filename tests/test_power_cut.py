"""A power cut loses what was not flushed to the disk: the run is resumed from what a disk without mercy would hold."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from benchmarks.load import TINY, noise_images

import fedu2
from fedu2.errors import UsageError
from fedu2.experiment import Experiment

Tree = dict[str, bytes]  # path inside the run → content
CLOCKS = {"seconds", "samples_per_second", "evaluation_seconds"}


class Disk:
    """What is certain to be on the disk, by inode: contents of files and names in directories, as of their last fsync.

    Two disks are asked at every flush and rename. A *lazy* one keeps of each directory the names that were flushed; an
    *eager* one has every change of names at once, and the contents that belong to them only when they are flushed.
    """

    def __init__(self, run: Path) -> None:
        self.run = run
        self.contents: dict[int, bytes] = {}
        self.names: dict[int, list[tuple[str, int, bool]]] = {}  # name, inode, whether it is a directory
        self.held: list[int] = []  # an inode that is open is not given to another file
        self.cuts: dict[str, Tree] = {}  # those that differ in more than drafts, which nobody reads

    def fsync(self, descriptor: int) -> None:
        self.look()
        self.held.append(os.dup(descriptor))
        found, path = os.fstat(descriptor), Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        if stat.S_ISDIR(found.st_mode):
            self.names[found.st_ino] = _listed(path)
        else:
            self.contents[found.st_ino] = path.read_bytes()
        self.look()

    def renaming(self, real: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
        def rename(source: Any, target: Any) -> None:
            self.look()
            real(source, target)
            self.look()

        return rename

    def look(self) -> None:
        """What would be left if the power went now."""
        if self.run.exists():
            for eager in (False, True):
                tree = dict(self._tree(self.run, self.run.stat().st_ino, "", eager))
                told = repr(sorted((name, content) for name, content in tree.items() if "/." not in f"/{name}"))
                self.cuts[told] = tree

    def _tree(self, path: Path, inode: int, prefix: str, eager: bool) -> Iterator[tuple[str, bytes]]:
        for name, child, is_directory in _listed(path) if eager else self.names.get(inode, []):
            if is_directory:
                yield from self._tree(path / name, child, f"{prefix}{name}/", eager)
            else:
                yield prefix + name, self.contents.get(child, b"")


def _listed(path: Path) -> list[tuple[str, int, bool]]:
    return [(entry.name, entry.inode(), entry.is_dir(follow_symlinks=False)) for entry in os.scandir(path)]


def _result(run: fedu2.Run) -> tuple[dict[str, bytes], list[dict[str, Any]]]:
    newest = max((run.path / "checkpoint").glob("round-*"))
    records = [json.loads(line) for line in (run.path / "metrics.jsonl").read_text().splitlines()]
    return (
        {path.name: path.read_bytes() for path in newest.glob("*.safetensors")},
        [{name: value for name, value in record.items() if name not in CLOCKS} for record in records],
    )


def _go_on(experiment: Experiment, run: Path) -> fedu2.Run:
    try:
        return fedu2.train(experiment, run, resume=True)
    except UsageError as error:
        if "holds no run to resume" not in str(error):
            raise
        return fedu2.train(experiment, run)


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="looks up names of open files as Linux tells them")
def test_a_power_cut_at_any_moment_loses_no_more_than_a_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = TINY | {
        "dataset": noise_images(8, 8), "data.image_size": 8, "method": "colour", "clients": 2, "rounds": 3,
        "batch_size": 4, "views.recipe": "none", "views.crop_scale": None, "evaluation.every": 0,
    }  # fmt: skip
    experiment, disk = Experiment.parse(settings), Disk(tmp_path / "run")
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", disk.fsync)
        for name in ("rename", "replace"):
            patch.setattr(os, name, disk.renaming(getattr(os, name)))
        expected = _result(fedu2.train(experiment, disk.run))
    for descriptor in disk.held:
        os.close(descriptor)
    assert len(disk.cuts) > 15
    for number, tree in enumerate(disk.cuts.values()):
        left = tmp_path / f"cut-{number}"
        for name, content in tree.items():
            (left / name).parent.mkdir(parents=True, exist_ok=True)
            (left / name).write_bytes(content)
        played = [int(name.split("/")[1][6:]) for name in tree if name.startswith("checkpoint/round-")]
        told = tree.get("metrics.jsonl", b"").count(b"\n") - 1
        assert max(played, default=0) >= told, sorted(tree)  # a round that was told of is kept
        assert _result(_go_on(experiment, left)) == expected, sorted(tree)
