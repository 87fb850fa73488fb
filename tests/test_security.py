"""What SECURITY.md says of the code: nothing is executed that was read, secrets stay secret, files have sane modes."""

from __future__ import annotations

import ast
import io
import logging
import os
import stat
import tarfile
from pathlib import Path

import numpy as np
import pytest
from fuzz.targets.images import PICTURES
from PIL import Image

import fedu2
from fedu2.data import decode
from fedu2.data.archives import read_archive
from fedu2.data.decode import decode_image
from fedu2.errors import DataError, UsageError
from fedu2.experiment import Experiment
from fedu2.federation.flower.keys import make_keys
from fedu2.federation.flower.wire import told_experiment
from fedu2.parsing import read_yaml

SOURCE = Path(fedu2.__file__).parent
FORBIDDEN = {
    "eval", "exec", "compile", "__import__", "os.system", "os.popen", "pickle.load", "pickle.loads", "marshal.loads",
    "shelve.open", "torch.load", "torch.jit.load", "torch.hub.load", "yaml.load", "yaml.unsafe_load", "yaml.full_load",
    "tempfile.mktemp", "subprocess.getoutput", "subprocess.getstatusoutput", "runpy.run_path", "runpy.run_module",
}  # fmt: skip
MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}


def _offences(source: str, pickles: bool = False) -> list[str]:
    """What a module uses of what is forbidden, by whatever name it was imported."""
    nodes = list(ast.walk(ast.parse(source)))
    meant, found = {}, []
    for node in nodes:
        if isinstance(node, ast.Import | ast.ImportFrom):
            inside = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            imported = {alias.asname or alias.name: inside + alias.name for alias in node.names}
            meant |= imported
            found += [name for name in imported.values() if name.partition(".")[0] in MODULES and not pickles]
    for node in nodes:
        if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Load):
            name = _name(node, meant).removeprefix("builtins.")
            found += [f"{name} in line {node.lineno}"] if name in FORBIDDEN else []
        if isinstance(node, ast.keyword) and node.arg in ("shell", "allow_pickle"):
            found.append(f"{node.arg} in line {node.value.lineno}")
    return found


def _name(node: ast.expr, meant: dict[str, str]) -> str:
    if isinstance(node, ast.Attribute):
        return f"{_name(node.value, meant)}.{node.attr}"
    return meant.get(node.id, node.id) if isinstance(node, ast.Name) else ""


@pytest.mark.parametrize("path", sorted(SOURCE.rglob("*.py")), ids=lambda path: str(path.relative_to(SOURCE)))
def test_nothing_that_is_read_is_executed(path: Path) -> None:
    pickles = path.name == "safe_pickle.py"  # takes them apart, see there
    assert _offences(path.read_text(encoding="utf-8"), pickles) == []


@pytest.mark.parametrize(
    "source",
    [
        "pickle.loads(b)",
        "from pickle import loads",
        "import cloudpickle.cloudpickle as c",
        "eval('1')",
        "import builtins; builtins.eval(x)",
        "from builtins import exec as run; run(x)",
        "list(map(eval, xs))",
        "from os import system; system(x)",
        "import os as o; f = o.system; f(x)",
        "import os.path; os.popen(x)",
        "import torch as t; t.load(x, weights_only=False)",
        "def f():\n    from torch import load as read\n    return read(x)",
        "import subprocess; subprocess.getoutput(x)",
        "import subprocess; subprocess.run(x, shell=True)",
    ],
)
def test_the_look_for_it_finds_it(source: str) -> None:
    assert _offences(source)


def test_the_look_for_it_finds_nothing_else() -> None:
    assert _offences("import re, torch\nmodel.eval(); re.compile(x); torch.compile(f)\nimport yaml as y") == []


def test_only_the_owner_writes_what_is_written_and_keys_only_he_reads(tmp_path: Path, micro: Experiment) -> None:
    before = os.umask(0o022)
    try:
        run = fedu2.train(micro.with_(rounds=1, local_steps=1), tmp_path / "run")
        os.umask(0)
        make_keys(tmp_path / "keys", ["north"])
    finally:
        os.umask(before)
    for path in run.path.rglob("*"):
        mode = path.stat().st_mode
        assert not mode & (stat.S_IWGRP | stat.S_IWOTH), path
        assert path.is_dir() or not mode & 0o111, path
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "keys").iterdir()}
    private = {name for name in modes if b"PRIVATE KEY" in (tmp_path / "keys" / name).read_bytes()}
    assert private == {"ca.key", "server.key", "north"}
    assert {modes[name] for name in private} == {0o600}
    assert stat.S_IMODE((tmp_path / "keys").stat().st_mode) == 0o700


def test_private_keys_are_not_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture
) -> None:
    from fedu2.cli import main

    with caplog.at_level(logging.DEBUG):
        assert main(["flower", "keys", str(tmp_path / "keys"), "--host", "localhost", "--node", "north"]) == 0
    lines = (tmp_path / "keys" / "north").read_text().splitlines()
    told = "".join(capfd.readouterr()) + caplog.text + repr(make_keys(tmp_path / "more", ["south"]))
    assert "PRIVATE" not in told
    assert not any(line in told for line in lines[1:-1])


def test_sites_are_told_no_path_of_the_servers() -> None:
    paths = {"data.root": "/private/a", "split.file": "/private/b", "flower.server_data": "/private/c"}
    assert "private" not in told_experiment(Experiment.parse({"dataset": "folder", "partition": "file", **paths}))


def test_archives_that_lead_elsewhere_are_refused(tmp_path: Path) -> None:
    for number, name in enumerate(("../x", "/x", "folder/../../x", "a/.." + "/x" * 60)):
        path = tmp_path / f"{number}.tar.gz"
        with tarfile.open(path, "w:gz", format=tarfile.USTAR_FORMAT) as tar:
            tar.addfile(tarfile.TarInfo(name), io.BytesIO())
        with pytest.raises(DataError, match="leads out of the archive"):
            list(read_archive(path, "folder", ["x"], 1 << 20, 1 << 20))


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_archives_of_every_writer_are_read(tmp_path: Path, form: int) -> None:
    """Also with extensions that only other members need."""
    with tarfile.open(tmp_path / "a.tar.gz", "w:gz", format=form) as tar:
        tar.addfile(tarfile.TarInfo("long/" * 19 + "name"), io.BytesIO())
        for number in range(3):
            member = tarfile.TarInfo(f"folder/{number}")
            member.size, member.mtime = 1000 * number, 1.5 if form == tarfile.PAX_FORMAT else 1
            tar.addfile(member, io.BytesIO(bytes([number]) * member.size))
    found = dict(read_archive(tmp_path / "a.tar.gz", "folder", ["0", "2"], 1 << 20, 1 << 20))
    assert found == {"0": b"", "2": b"\2" * 2000}


def test_aliases_are_read_as_long_as_they_are_few(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("fur: &a {weight: 1}\nother: {<<: *a, more: 2}\n")
    assert read_yaml(path) == {"fur": {"weight": 1}, "other": {"weight": 1, "more": 2}}
    path.write_text("a: &a [1, 2]\nb: &b [" + "*a, " * 4000 + "]\n")
    with pytest.raises(UsageError, match="says more than 10,000 things"):
        read_yaml(path)


def test_configurations_are_short(tmp_path: Path) -> None:
    """Numbers in base 60 take time by the square of their length."""
    path = tmp_path / "config.yaml"
    path.write_text("seed: 1" + ":1" * (1 << 15))
    with pytest.raises(UsageError, match="more than 65,536 bytes"):
        read_yaml(path)


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "P", "LA", "L", "1", "CMYK", "I;16", "F", "I"])
def test_pictures_in_strips_look_as_they_do_in_one_piece(tmp_path: Path, mode: str, monkeypatch) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (40, 60, 4), np.uint8)
    whole = Image.fromarray(pixels, "RGBA")
    wide = {"I;16": np.uint16, "F": np.float32, "I": np.int32}
    if mode in wide:
        picture = Image.fromarray((pixels[..., 0].astype(np.float64) * 200).astype(wide[mode]))
    else:
        picture = whole.convert(mode) if mode in ("RGBA", "LA") else whole.convert("RGB").convert(mode)
    picture.save(tmp_path / "a.tif")
    expected = decode_image(tmp_path / "a.tif", 16)
    monkeypatch.setattr(decode, "STRIP", 7 * 60)
    assert np.array_equal(decode_image(tmp_path / "a.tif", 16), expected)


def test_pictures_with_too_many_pixels_are_refused(tmp_path: Path) -> None:
    Image.new("1", (9000, 9000)).save(tmp_path / "a.png")
    with pytest.raises(ValueError, match="9000×9000 pixels are more than the limit"):
        decode_image(tmp_path / "a.png", 16)


@pytest.mark.parametrize("name", ["refused.jp2", "refused.webp", "refused.avif"])
def test_formats_whose_decoders_take_more_memory_have_limits_of_their_own(name: str) -> None:
    """Their 64 million pixels would take up to 2.3 GB."""
    with pytest.raises(ValueError, match="7999×7999 pixels are more than the limit"):
        decode_image(PICTURES / name, 16)
