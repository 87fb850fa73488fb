"""Files of others: whatever lies in their place, reading ends, within bounds, and their names do no harm."""

from __future__ import annotations

import logging
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

import fedu2
from fedu2.cli import main
from fedu2.data import decode, load_partition
from fedu2.errors import DataError, TrainingError
from fedu2.experiment import Experiment
from fedu2.federation import journal
from fedu2.federation.journal import Journal
from fedu2.files import read_bytes, read_text, read_within, shown
from fedu2.report import snapshot
from fedu2.rundir import RunDirectory

FORGED = "\x1b]0;owned\x07\nfedu2: forged\u202e.png"


class Hang(BaseException):
    """Not an Exception, for those are caught by the code that is tried."""


@pytest.fixture(autouse=True)
def impatience() -> Iterator[None]:
    """A test that would wait for a pipe for ever fails instead."""

    def give_up(*_: object) -> None:
        raise Hang

    before = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(30)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    experiment = Experiment.parse({"data.image_size": 16, "clients": 2, "width": 4, "rounds": 1, "local_steps": 1})
    path = tmp_path_factory.mktemp("files") / "run"
    fedu2.train(experiment, path)
    (path / "evaluation.json").write_text("[]")
    return path


def test_only_regular_files_of_bounded_length_are_read(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"four")
    assert read_text(tmp_path / "file", 4) == "four"
    with pytest.raises(OSError, match="more than 3 bytes"):
        read_bytes(tmp_path / "file", 3)
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "device").symlink_to("/dev/zero")
    for name in ("pipe", "device"):
        with pytest.raises(OSError, match="no regular file") as told:
            read_bytes(tmp_path / name)
        assert told.value.filename == str(tmp_path / name)
    for name in ("missing", "."):
        with pytest.raises(OSError, match=r"No such file|directory"):
            read_bytes(tmp_path / name)
    with open("/dev/zero", "rb") as file, pytest.raises(OSError, match="more than 1,000 bytes"):
        read_within(file, 1000)


@pytest.mark.parametrize(
    "name",
    [
        "config.yaml", "metrics.jsonl", "summary.json", "partition.json", "evaluation.json", "images.blake2b",
        "checkpoint/metrics.jsonl", "checkpoint/round-000001/manifest.json",
        "checkpoint/round-000001/server.safetensors",
    ],
)  # fmt: skip
def test_no_pipe_in_a_run_is_waited_for(
    trained: Path, tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    shutil.copytree(trained, run)
    (run / name).unlink()
    os.mkfifo(run / name)
    resumed = "checkpoint" in name or name in ("partition.json", "images.blake2b")
    assert main(["train", "--resume", "--out", str(run)] if resumed else ["report", str(run), "--no-figures"]) in (0, 1)
    assert "Traceback" not in capsys.readouterr().err


def test_no_pipe_is_taken_for_a_configuration_a_partition_or_a_snapshot(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    assert main(["train", "--config", str(pipe), "--out", str(tmp_path / "run")]) == 2
    assert "it is no regular file" in capsys.readouterr().err
    with pytest.raises(DataError, match="no regular file"):
        load_partition("/dev/zero", 10)
    assert snapshot._read(pipe, "tag") is None


def test_a_runs_configuration_is_not_read_beyond_its_bound(trained: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_text((trained / "config.yaml").read_text() + "#" * (1 << 16))
    with pytest.raises(fedu2.errors.UsageError, match="more than 65,536 bytes"):
        RunDirectory(run).config()


@pytest.mark.parametrize("claim", [-1, 1 << 39])
def test_a_manifest_does_not_say_how_much_memory_is_taken(
    tmp_path: Path, claim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal, "LONGEST", 1000)
    with (tmp_path / "metrics.jsonl").open("wb") as file:
        file.truncate(1 << 40)  # of which the disk holds nothing
    with pytest.raises(TrainingError, match="is damaged or missing"):
        Journal(tmp_path / "metrics.jsonl").records({"bytes": claim, "sha256": ""}, tmp_path / "spare")


def test_names_are_shown_as_one_line_of_letters() -> None:
    assert shown("très_ 漢字.png") == "très_ 漢字.png"
    assert shown(FORGED) == "\\x1b]0;owned\\x07\\nfedu2: forged\\u202e.png"
    assert shown("\udcff\ud800") == "\ufffd\ufffd"


def test_names_of_files_forge_no_line_and_command_no_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    images = tmp_path / "images"
    (images / "north").mkdir(parents=True)
    (images / "north" / FORGED).write_bytes(b"no picture")
    assert main(["train", "dataset=folder", f"data.root={images}", "--out", str(tmp_path / "run")]) == 1
    assert main(["report", str(tmp_path / FORGED)]) == 2
    logging.getLogger("fedu2").warning("%s", FORGED)
    told = capsys.readouterr()
    assert "forged" in told.err
    assert all(line.isprintable() for line in (told.out + told.err).splitlines())
    assert "\nfedu2: forged" not in told.err


def test_reasons_forge_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path: Path, size: int) -> None:
        raise ValueError(f"{path} says \x1b[2J")

    monkeypatch.setattr(decode, "decode_image", fail)
    _, reasons = decode.decode_files([tmp_path / FORGED], 16)
    assert reasons == {0: f"{shown(FORGED)} says \\x1b[2J"}
