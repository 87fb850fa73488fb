"""`fedu2 embed`: vectors of any pictures, resumed after an interruption, written whole or not at all."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from rich.console import Console
from safetensors import safe_open

import fedu2
from fedu2.cli import main
from fedu2.data.decode import decode_files
from fedu2.embed import command, embed, pipeline
from fedu2.errors import DataError, UsageError
from fedu2.evaluation.monitor import extract
from fedu2.experiment import Experiment

DOCUMENT = Path(__file__).parents[1] / "docs" / "take-home.md"
VALUES = {
    "data.image_size": 16, "clients": 2, "partition": "iid", "encoder": "tiny", "width": 4, "rounds": 2,
    "local_steps": 2, "batch_size": 32, "evaluation.every": 1,
}  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> fedu2.Run:
    return fedu2.train(Experiment.parse(VALUES), tmp_path_factory.mktemp("runs") / "first")


def _noise(size: tuple[int, int] = (20, 24), seed: int = 0) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), np.uint8)
    return Image.fromarray(pixels)


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    folder = tmp_path / "photos"
    (folder / "deep" / "deeper").mkdir(parents=True)
    for number, name in enumerate(["b.png", "a.png", "deep/c.png", "deep/deeper/d.png", "e.png"]):
        _noise(seed=number).save(folder / name)
    return folder


def _expected(run: fedu2.Run, paths: Sequence[Path], **options: bool) -> np.ndarray:
    images, reasons = decode_files(list(paths), 16)
    assert not reasons
    return extract(run.encoder(**options), images).numpy()


def test_vectors_are_those_of_the_encoder(run: fedu2.Run, photos: Path, tmp_path: Path) -> None:
    (photos / ".hidden.png").write_bytes(b"")
    (photos / "notes.txt").write_text("no picture")
    embedding = embed(run, photos, tmp_path / "out" / "vectors.npz", batch_size=2)
    names = ["a.png", "b.png", "deep/c.png", "deep/deeper/d.png", "e.png"]
    assert list(embedding.files) == names
    assert np.abs(embedding.vectors - _expected(run, [photos / name for name in names])).max() < 1e-6
    with np.load(tmp_path / "out" / "vectors.npz", allow_pickle=False) as written:
        assert np.array_equal(written["vectors"], embedding.vectors)
        assert written["vectors"].dtype == np.float32
        assert written["files"].tolist() == names
        assert written["skipped"].shape == (0,)
        about = json.loads(str(written["about"]))
    assert (about["run"], about["method"], about["round"], about["dimension"]) == ("first", "fedu2", 2, 16)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["vectors.npz"]


def test_best_round_and_unit_length(run: fedu2.Run, photos: Path, tmp_path: Path) -> None:
    best = embed(run, photos / "a.png", tmp_path / "best.npz", best=True)
    assert best.about["round"] == run.best_round
    assert best.files == ("a.png",)
    assert np.abs(best.vectors - _expected(run, [photos / "a.png"], best=True)).max() < 1e-6
    unit = embed(run, photos, tmp_path / "unit.npz", normalize=True)
    assert np.abs(np.linalg.norm(unit.vectors, axis=1) - 1).max() < 1e-6
    assert unit.about["normalized"] is True


def test_the_other_endings_hold_the_same(run: fedu2.Run, photos: Path, tmp_path: Path) -> None:
    (photos / "zero.png").write_bytes(b"")
    expected = embed(run, photos, tmp_path / "vectors.csv")
    with (tmp_path / "vectors.csv").open(newline="") as file:
        rows = list(csv.reader(file))
    assert rows[0] == ["file", *map(str, range(16))]
    assert [row[0] for row in rows[1:]] == list(expected.files)
    assert np.array_equal(np.array([row[1:] for row in rows[1:]], np.float32), expected.vectors)
    embed(run, photos, tmp_path / "vectors.SafeTensors")
    with safe_open(tmp_path / "vectors.SafeTensors", framework="np") as file:
        assert np.array_equal(file.get_tensor("vectors"), expected.vectors)
        assert json.loads(file.get_tensor("files").tobytes()) == list(expected.files)
        assert json.loads(file.get_tensor("skipped").tobytes()) == list(expected.skipped)
        assert json.loads(file.metadata()["about"]) == expected.about
    modes = {(tmp_path / name).stat().st_mode for name in ("vectors.csv", "vectors.SafeTensors")}
    assert len(modes) == 1


def test_lists(run: fedu2.Run, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["photos/b.png", str(photos / "a.png"), "photos/b.png", "photos/odd name", "photos/gone.png"]
    shutil.copy(photos / "e.png", photos / "odd name")  # no ending, but a picture
    (tmp_path / "list.txt").write_bytes(b"\xef\xbb\xbf" + "\r\n".join([*names, "", ""]).encode())
    embedding = embed(run, tmp_path / "list.txt", tmp_path / "vectors.npz", batch_size=2)
    assert list(embedding.files) == names[:4]
    assert embedding.skipped == ("photos/gone.png: does not exist",)
    assert np.allclose(embedding.vectors[0], embedding.vectors[2], atol=1e-6)
    assert np.abs(embedding.vectors[3] - _expected(run, [photos / "e.png"])).max() < 1e-6

    class Stdin:
        buffer = io.BytesIO(b"a.png\ne.png\n")

    monkeypatch.setattr(sys, "stdin", Stdin)
    monkeypatch.chdir(photos)
    assert embed(run, "-", tmp_path / "stdin.npz").files == ("a.png", "e.png")
    assert embed(run, ["deep/c.png", Path("a.png")], tmp_path / "paths.npz").files == ("deep/c.png", "a.png")


def test_a_pipe_can_be_a_list(run: fedu2.Run, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(photos)
    reader, writer = os.pipe()
    os.write(writer, b"a.png\n")
    os.close(writer)
    assert embed(run, f"/dev/fd/{reader}", tmp_path / "vectors.npz").files == ("a.png",)
    os.close(reader)


def test_pictures_of_every_kind(run: fedu2.Run, tmp_path: Path) -> None:
    """Each beside a plain RGB picture that must look the same to the encoder."""
    folder, plain = tmp_path / "kinds", tmp_path / "plain"
    folder.mkdir()
    plain.mkdir()
    picture = _noise((16, 16), 1)
    grey = picture.convert("L")
    alpha = Image.new("L", (16, 16), 255)
    alpha.paste(0, (0, 0, 8, 16))
    on_white = picture.copy()
    on_white.paste("white", (0, 0, 8, 16))
    palette = Image.new("P", (16, 16), 0)
    palette.putpalette([10, 20, 30, 200, 100, 50])
    palette.paste(1, (0, 0, 8, 16))
    turned = Image.Exif()
    turned[0x0112] = 6  # to be turned by a quarter, clockwise

    kinds: dict[str, tuple[Image.Image, dict, Image.Image]] = {
        "grey.png": (grey, {}, grey.convert("RGB")),
        "grey16.png": (Image.fromarray(np.asarray(grey).astype(np.uint16) * 257), {}, grey.convert("RGB")),
        "transparent.png": (_with_alpha(picture, alpha), {}, on_white),
        "palette.png": (palette, {"transparency": 1}, _halves("white", (10, 20, 30))),
        "animated.gif": (palette, {"save_all": True, "append_images": [palette.rotate(90)]},
                         _halves((200, 100, 50), (10, 20, 30))),
        "turned.png": (picture.transpose(Image.Transpose.ROTATE_90), {"exif": turned}, picture),
        "wide.png": (_framed(picture), {}, picture),
        "dot.png": (Image.new("RGB", (1, 1), (9, 99, 199)), {}, Image.new("RGB", (16, 16), (9, 99, 199))),
        "cmyk.jpg": (Image.new("RGB", (40, 40), (200, 100, 50)).convert("CMYK"), {"quality": 100},
                     Image.new("RGB", (16, 16), (200, 100, 50))),
    }  # fmt: skip
    for name, (image, options, look) in kinds.items():
        image.save(folder / name, **options)
        look.save(plain / f"{name}.png")
    embedding = embed(run, folder, tmp_path / "vectors.npz", batch_size=4)
    assert list(embedding.files) == sorted(kinds)
    expected = _expected(run, [plain / f"{name}.png" for name in embedding.files])
    close = np.abs(embedding.vectors - expected).max(axis=1)
    lossy = [name == "cmyk.jpg" for name in embedding.files]
    assert (close < np.where(lossy, 0.05, 1e-6)).all(), dict(zip(embedding.files, close, strict=True))


def _with_alpha(picture: Image.Image, alpha: Image.Image) -> Image.Image:
    transparent = picture.copy()
    transparent.putalpha(alpha)
    return transparent


def _halves(left: object, right: object) -> Image.Image:
    image = Image.new("RGB", (16, 16), right)
    image.paste(left, (0, 0, 8, 16))
    return image


def _framed(picture: Image.Image) -> Image.Image:
    """Wider than high, with the picture in the middle."""
    wide = Image.new("RGB", (48, 16), "red")
    wide.paste(picture, (16, 0))
    return wide


def test_what_cannot_be_read_is_skipped_and_named(
    run: fedu2.Run, photos: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _noise((200, 200)).save(photos / "cut.jpg")
    (photos / "cut.jpg").write_bytes((photos / "cut.jpg").read_bytes()[:700])
    (photos / "text.png").write_text("this is no picture")
    (photos / "zero.png").write_bytes(b"")
    (photos / "folder.png").mkdir()
    _noise(seed=7).save(photos / "folder.png" / "inside.png")
    os.mkfifo(photos / "pipe.png")
    (photos / "dangling.png").symlink_to(photos / "nowhere.png")
    for number in range(2):
        (photos / f"zz{number}.png").write_bytes(b"")
    with caplog.at_level("WARNING", "fedu2"):
        embedding = embed(run, photos, tmp_path / "vectors.npz", batch_size=3)
    unreadable = ["cut.jpg", "dangling.png", "pipe.png", "text.png", "zero.png", "zz0.png", "zz1.png"]
    assert [line.partition(":")[0] for line in embedding.skipped] == unreadable
    assert "folder.png/inside.png" in embedding.files
    assert len(embedding.vectors) == len(embedding.files) == 6
    assert np.abs(embedding.vectors - _expected(run, [photos / name for name in embedding.files])).max() < 1e-6
    assert "7 of 13 images cannot be read and are skipped: cut.jpg" in caplog.text
    assert "zero.png" in caplog.text
    assert "zz0.png" not in caplog.text  # five are enough
    assert np.load(tmp_path / "vectors.npz")["skipped"].tolist() == list(embedding.skipped)


def test_nothing_readable_writes_nothing(run: fedu2.Run, tmp_path: Path) -> None:
    (tmp_path / "only").mkdir()
    for name in "ab":
        (tmp_path / "only" / f"{name}.png").write_bytes(b"")
    with pytest.raises(DataError, match=r"none of the 2 images can be read; the first: a\.png"):
        embed(run, tmp_path / "only", tmp_path / "new" / "folder" / "vectors.npz", batch_size=1)
    assert [path.name for path in tmp_path.iterdir()] == ["only"]


def test_names_of_any_bytes_come_back(run: fedu2.Run, photos: Path, tmp_path: Path) -> None:
    odd = os.fsdecode(b'caf\xe9 \xff,"\n.png')
    try:
        shutil.copy(photos / "a.png", photos / odd)
    except OSError:
        pytest.skip("this file system has names of letters only")
    (photos / os.fsdecode(b"bad\xe9.png")).write_bytes(b"")
    for ending in ("npz", "csv", "safetensors"):
        assert odd in embed(run, photos, tmp_path / f"vectors.{ending}").files
    assert odd in np.load(tmp_path / "vectors.npz")["files"].tolist()
    with safe_open(tmp_path / "vectors.safetensors", framework="np") as file:
        assert odd in json.loads(file.get_tensor("files").tobytes())
    with (tmp_path / "vectors.csv").open(newline="", encoding="utf-8", errors="surrogateescape") as text:
        assert odd in [row[0] for row in csv.reader(text)]


class _Stopped(BaseException):
    """Stands for Ctrl-C."""


def _stop_after(count: int):
    def watch(done: int, total: int) -> None:
        if done >= count:
            raise _Stopped

    return watch


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the files that are decoded, in order."""
    names: list[str] = []

    def spy(paths: list[Path], size: int) -> object:
        names.extend(path.name for path in paths)
        return decode_files(paths, size)

    monkeypatch.setattr(pipeline, "decode_files", spy)
    return names


def test_an_interrupted_embedding_goes_on(run: fedu2.Run, photos: Path, tmp_path: Path, decoded: list[str]) -> None:
    (photos / "bb.png").write_bytes(b"")  # skipped, in a batch that is not read again
    whole = embed(run, photos, tmp_path / "whole.npz", batch_size=2)
    out = tmp_path / "vectors.npz"
    with pytest.raises(_Stopped):
        embed(run, photos, out, batch_size=2, watch=_stop_after(4))
    assert not out.exists()
    assert len(list((tmp_path / "vectors.npz.partial").iterdir())) == 2
    decoded.clear()
    seen: list[tuple[int, int]] = []
    again = embed(run, photos, out, batch_size=2, watch=lambda done, total: seen.append((done, total)))
    assert decoded == ["d.png", "e.png"]
    assert seen == [(4, 6), (6, 6)]
    assert np.array_equal(again.vectors, whole.vectors)
    assert (again.files, again.skipped, again.about) == (whole.files, whole.skipped, whole.about)
    assert not (tmp_path / "vectors.npz.partial").exists()


@pytest.mark.parametrize("change", ["list", "content", "option", "model"])
def test_what_has_changed_begins_anew(
    run: fedu2.Run, photos: Path, tmp_path: Path, decoded: list[str], change: str, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.copytree(run.path, tmp_path / "run")
    out, options = tmp_path / "vectors.npz", {}
    with pytest.raises(_Stopped):
        embed(fedu2.Run(tmp_path / "run"), photos, out, batch_size=2, watch=_stop_after(2))
    if change == "list":
        _noise(seed=9).save(photos / "f.png")
    elif change == "content":
        _noise(seed=9).save(photos / "a.png")
    elif change == "option":
        options = {"normalize": True}
    else:
        more = Experiment.parse(run.experiment.flat(), ["rounds=3"])
        fedu2.train(more, tmp_path / "run", resume=True)
    decoded.clear()
    with caplog.at_level("INFO", "fedu2"):
        embedding = embed(fedu2.Run(tmp_path / "run"), photos, out, batch_size=2, **options)
    assert decoded[0] == "a.png"
    assert "beginning anew" in caplog.text
    fresh = embed(fedu2.Run(tmp_path / "run"), photos, tmp_path / "fresh.npz", batch_size=2, **options)
    assert np.array_equal(embedding.vectors, fresh.vectors)
    assert not (tmp_path / "vectors.npz.partial").exists()


def test_a_damaged_part_is_made_again(run: fedu2.Run, photos: Path, tmp_path: Path, decoded: list[str]) -> None:
    out = tmp_path / "vectors.npz"
    with pytest.raises(_Stopped):
        embed(run, photos, out, batch_size=2, watch=_stop_after(4))
    part = min((tmp_path / "vectors.npz.partial").iterdir())
    part.write_bytes(part.read_bytes()[:-8])
    decoded.clear()
    embedding = embed(run, photos, out, batch_size=2)
    assert decoded == ["a.png", "b.png", "e.png"]
    assert np.abs(embedding.vectors - _expected(run, [photos / name for name in embedding.files])).max() < 1e-6


def test_foreign_files_in_the_folder_of_parts_stay(run: fedu2.Run, photos: Path, tmp_path: Path) -> None:
    (tmp_path / "vectors.npz.partial").mkdir()
    (tmp_path / "vectors.npz.partial" / "mine.txt").write_text("mine")
    embed(run, photos, tmp_path / "vectors.npz")
    assert [path.name for path in (tmp_path / "vectors.npz.partial").iterdir()] == ["mine.txt"]


def test_a_killed_process_goes_on(run: fedu2.Run, tmp_path: Path) -> None:
    """kill -9 at a moment that nobody chose."""
    folder, out = tmp_path / "photos", tmp_path / "vectors.npz"
    folder.mkdir()
    for number in range(300):
        _noise(seed=number).save(folder / f"{number:03d}.png")
    arguments = ["embed", str(run.path), str(folder), "--out", str(out), "--batch-size", "1"]
    process = subprocess.Popen([sys.executable, "-m", "fedu2", *arguments], stderr=subprocess.PIPE)
    parts = tmp_path / "vectors.npz.partial"
    deadline = time.monotonic() + 180
    while len(list(parts.glob("*-*.safetensors"))) < 5 and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert not out.exists()
    assert main(arguments) == 0
    with np.load(out) as written:
        assert written["files"].tolist() == [f"{number:03d}.png" for number in range(300)]
        expected = _expected(run, [folder / name for name in written["files"]])
        assert np.abs(written["vectors"] - expected).max() < 1e-5
    assert not parts.exists()


def test_memory_holds_two_batches(
    run: fedu2.Run, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(20):
        shutil.copy(photos / "a.png", photos / f"more{number}.png")
    begun, used = [], []

    def spy(paths: list[Path], size: int) -> object:
        begun.append(len(paths))
        assert sum(begun) - sum(used) <= 4
        return decode_files(paths, size)

    def count(encoder: torch.nn.Module, pixels: torch.Tensor, normalize: bool) -> torch.Tensor:
        used.append(len(pixels))
        return torch.zeros(len(pixels), 16)

    monkeypatch.setattr(pipeline, "decode_files", spy)
    monkeypatch.setattr(pipeline, "_vectors", count)
    embed(run, photos, tmp_path / "vectors.npz", batch_size=2)
    assert sum(begun) == sum(used) == 25
    assert max(begun) == 2


def test_results_are_not_overwritten_unasked(run: fedu2.Run, photos: Path, tmp_path: Path) -> None:
    out = tmp_path / "vectors.npz"
    out.write_text("precious")
    with pytest.raises(UsageError, match="--force overwrites it"):
        embed(run, photos, out)
    with pytest.raises(_Stopped):
        embed(run, photos, out, force=True, watch=_stop_after(1))
    assert out.read_text() == "precious"
    embed(run, photos, out, force=True)
    assert len(np.load(out)["files"]) == 5


def test_a_second_process_is_kept_out(run: fedu2.Run, photos: Path, tmp_path: Path) -> None:
    out = tmp_path / "vectors.npz"

    def meanwhile(done: int, total: int) -> None:
        with pytest.raises(UsageError, match="by another process"):
            embed(run, photos, out)

    embed(run, photos, out, watch=meanwhile)
    assert out.exists()


def test_what_cannot_be_embedded(
    run: fedu2.Run, photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(tmp_path.rglob("*"))

    def fails(code: int, sentence: str, *arguments: object) -> None:
        assert main(["embed", *map(str, arguments)]) == code
        assert sentence in capsys.readouterr().err
        assert sorted(tmp_path.rglob("*")) == before

    out = ("--out", tmp_path / "vectors.npz")
    fails(
        2, "unknown ending of an output file '.parquet': known are .csv, .npz", run.path, photos, "--out", "v.parquet"
    )
    fails(2, "is a directory", run.path, photos, "--out", _made(tmp_path / "is.npz", before))
    fails(2, "holds no run", tmp_path, photos, *out)
    fails(1, "gone does not exist", run.path, tmp_path / "gone", *out)
    fails(2, "device=gpu cannot be used", run.path, photos, *out, "--device", "gpu")
    fails(2, "batch-size", run.path, photos, *out, "--batch-size", "0")
    fails(1, "names no images", run.path, _made(tmp_path / "empty", before), *out)
    (tmp_path / "list.txt").write_text("\n \n")
    (tmp_path / "binary").write_bytes(b"\x89\0\1")
    shutil.copytree(run.path, tmp_path / "begun", ignore=shutil.ignore_patterns("checkpoint"))
    before = sorted(tmp_path.rglob("*"))
    fails(1, "list.txt names no images", run.path, tmp_path / "list.txt", *out)
    fails(1, "binary is no list of paths", run.path, tmp_path / "binary", *out)
    fails(1, "has no checkpoint yet", tmp_path / "begun", photos, *out)


def _made(folder: Path, before: list[Path]) -> Path:
    folder.mkdir()
    before.append(folder)
    before.sort()
    return folder


def test_the_command_says_what_came_out(
    run: fedu2.Run, photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (photos / "zero.png").write_bytes(b"")
    assert main(["embed", str(run.path), str(photos), "--out", str(tmp_path / "vectors.npz")]) == 0
    shown = capsys.readouterr()
    assert "5 vectors of 16 numbers, 1 skipped, by tiny after round 2" in shown.out
    assert "images/s" in shown.out
    assert "1 of 6 images cannot be read and are skipped: zero.png" in shown.err


def test_progress_on_a_terminal_and_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "PAUSE", 0.0)
    terminal, file = (Console(file=io.StringIO(), force_terminal=yes, width=100) for yes in (True, False))
    for console in (terminal, file):
        with command._Progress(console) as progress:
            for done in (100, 200, 1200):
                progress.watch(done, 4000)
                time.sleep(0.01)
                progress.bar.refresh()
    bar = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", terminal.file.getvalue())
    assert "1200/4000" in bar
    assert re.search(r"\d+ images/s", bar)
    lines = file.file.getvalue().splitlines()
    assert lines[0] == "going on: 100 of 4,000 images are done"
    assert re.fullmatch(r"1,200 of 4,000 images, \d+ images/s, .* left", lines[-1])


def test_ctrl_c_is_one_sentence(
    run: fedu2.Run, photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(pipeline, "_vectors", interrupt)
    assert main(["embed", str(run.path), str(photos), "--out", str(tmp_path / "vectors.npz")]) == 130
    assert "the same command goes on where it stopped" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["photos"]


def test_the_document_runs_as_shown(
    run: fedu2.Run, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(run.path, tmp_path / "runs" / "first")
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), flags=re.S)[:2]
    space: dict = {}
    embed(run, "photos", "unit.npz", normalize=True)
    for block in blocks:
        exec(compile(block.replace('"safetensors", "onnx", "pt2"', '"safetensors"'), "take-home.md", "exec"), space)
    assert space["vectors"].shape == (5, 16)
    assert (space["folder"] / "encoder.safetensors").exists()
    assert space["nearest"][0] == 0  # nothing is nearer to an image than itself
    assert "a.png" in capsys.readouterr().out
