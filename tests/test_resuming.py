"""A run directory that somebody has changed, linked elsewhere or taken: what goes on is what began, or nothing."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from benchmarks.load import TINY, noise_images

import fedu2
from fedu2.cli import main
from fedu2.commands import experiment_from
from fedu2.data import Dataset, ImageSet, load_dataset
from fedu2.errors import DataError, TrainingError, UsageError
from fedu2.experiment import Experiment
from fedu2.federation.callbacks import Callback
from fedu2.federation.checkpoint import Checkpoints
from fedu2.files import unseal
from fedu2.interrupts import uninterrupted
from fedu2.rundir import RunDirectory

MINUTE = TINY | {
    "dataset": noise_images(48, 8), "data.image_size": 8, "clients": 2, "width": 2, "rounds": 2, "local_steps": 1,
    "batch_size": 8, "views.recipe": "none", "evaluation.every": 0, "optimizer.schedule": "constant",
}  # fmt: skip


def _minute(**settings: Any) -> Experiment:
    return Experiment.parse({**MINUTE, **{key.replace("__", "."): value for key, value in settings.items()}})


def _go_on(run: Path, *settings: str) -> fedu2.Run:
    return fedu2.train(experiment_from(["rounds=3", *settings], None, run), run, resume=True)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fedu2.train(_minute(), tmp_path_factory.mktemp("resuming") / "run").path


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "run"))


@pytest.fixture
def precious(tmp_path: Path) -> Path:
    path = tmp_path / "precious"
    path.write_text("precious")
    return path


# Links


def test_a_lock_that_is_a_link_is_refused(run: Path, precious: Path) -> None:
    (run / ".lock").unlink()
    (run / ".lock").symlink_to(precious)
    with pytest.raises(UsageError, match=r"\.lock is a link"):
        _go_on(run)
    assert precious.read_text() == "precious"


def test_a_lock_that_is_a_pipe_does_not_hang(run: Path) -> None:
    (run / ".lock").unlink()
    os.mkfifo(run / ".lock")
    assert _go_on(run).finished


@pytest.mark.parametrize("same", [False, True])
def test_records_are_not_written_through_a_link(run: Path, precious: Path, same: bool) -> None:
    journal = run / "checkpoint" / "metrics.jsonl"
    if same:
        precious.write_bytes(journal.read_bytes())
    before = precious.read_bytes()
    journal.unlink()
    journal.symlink_to(precious)
    assert _go_on(run).finished
    assert precious.read_bytes() == before
    assert journal.read_bytes() == (run / "metrics.jsonl").read_bytes()


@pytest.mark.parametrize("name", ["checkpoint", "tensorboard"])
def test_a_folder_that_is_a_link_is_refused(run: Path, tmp_path: Path, name: str) -> None:
    elsewhere = tmp_path / "elsewhere"
    (run / name).rename(elsewhere)
    (elsewhere / "round-000000").mkdir()
    (run / name).symlink_to(elsewhere)
    before = sorted(path.name for path in elsewhere.iterdir())
    with pytest.raises(UsageError, match=f"{name} is a link"):
        _go_on(run)
    assert sorted(path.name for path in elsewhere.iterdir()) == before


@pytest.mark.parametrize(
    ("command", "name"), [(["train", "--resume", "--compare", "--out"], "fedavg"), (["figures"], "figures")]
)
def test_nothing_is_written_into_linked_folders_of_a_run(
    run: Path, tmp_path: Path, command: list[str], name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "elsewhere").mkdir()
    (run / name).symlink_to(tmp_path / "elsewhere")
    assert main([*command, str(run)]) == 2
    assert f"{name} is a link" in capsys.readouterr().err
    assert not list((tmp_path / "elsewhere").iterdir())


# Images, keys, partitions


def _with_other(images: ImageSet, labels: bool) -> ImageSet:
    if labels:
        assert images.labels is not None
        return replace(images, labels=images.labels.roll(1))
    return replace(images, images=images.images.flip(0))


@pytest.mark.parametrize("part", ["train", "test"])
@pytest.mark.parametrize("labels", [False, True])
@pytest.mark.parametrize("forgotten", [False, True])
def test_other_images_or_labels_are_refused(
    run: Path, monkeypatch: pytest.MonkeyPatch, part: str, labels: bool, forgotten: bool
) -> None:
    def changed(*asked: Any) -> Dataset:
        dataset = load_dataset(*asked)
        return replace(dataset, **{part: _with_other(getattr(dataset, part), labels)})

    monkeypatch.setattr("fedu2.run.load_dataset", changed)
    if forgotten:
        (run / "images.blake2b").unlink()  # the checkpoint knows them, too
    what = "images" if (part, labels) == ("train", False) else "labels or test images"
    with pytest.raises(UsageError, match=f"the {what} of dataset=noise-48-8 are not those that the run"):
        _go_on(run)


def test_images_that_nothing_is_known_of_are_told(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    _without(run, "data")
    (run / "images.blake2b").unlink()
    assert _go_on(run).finished
    assert "images.blake2b, by which the run's images are known, is missing or damaged: they cannot be" in caplog.text


def test_an_earlier_version_knew_the_training_images_alone(run: Path) -> None:
    _without(run, "data")
    path = run / "images.blake2b"
    path.write_text(unseal(path.read_text()).split()[0] + "\n")
    assert _go_on(run).finished
    assert len(unseal(path.read_text()).split()) == 2


def _without(run: Path, entry: str) -> None:
    """Manifests as an earlier version wrote them."""
    for path in run.glob("checkpoint/*/manifest.json"):
        content = json.loads(path.read_text())
        path.write_text(json.dumps({key: value for key, value in content.items() if key not in (entry, "digest")}))


@pytest.mark.parametrize("setting", ["engine.threads=2", "evaluation.k=1", "evaluation.temperature=0.5"])
def test_what_a_run_keeps_is_not_changed(run: Path, setting: str) -> None:
    key = setting.partition("=")[0]
    with pytest.raises(UsageError, match=rf"another configuration: {key} was .* and is now"):
        _go_on(run, setting)


def test_a_configuration_that_lost_its_checksum_is_not_taken(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = run / "config.yaml"
    config.write_text(unseal(config.read_text()).replace("seed: 0", "seed: 7"))
    assert _go_on(run).experiment.seed == 0
    assert "config.yaml is damaged, or was changed by hand: its checksum is gone" in caplog.text


@pytest.fixture
def dealt(tmp_path: Path) -> tuple[Path, Path]:
    """A run whose partition is of a file; the run, and the file."""
    file = tmp_path / "shares.json"
    file.write_text(json.dumps([list(range(8)), list(range(8, 24))]))
    return fedu2.train(_minute(partition="file", split__file=str(file)), tmp_path / "dealt").path, file


def test_a_partition_is_that_which_the_run_began_with(
    dealt: tuple[Path, Path], caplog: pytest.LogCaptureFixture
) -> None:
    run, file = dealt
    whole, asked = (run / "partition.json").read_text(), file.read_text()
    for damaged in (whole[:20], json.dumps([[0, 1], [2, 3]])):
        (run / "partition.json").write_text(damaged)
        assert _go_on(run).finished
        assert (run / "partition.json").read_text() == whole
        assert "the partition is made anew from the experiment" in caplog.text
        (run / "partition.json").write_text(damaged)
        file.write_text(json.dumps([[0, 1], [2, 3]]))
        with pytest.raises(DataError, match="is not the partition that the run began with"):
            _go_on(run)
        file.write_text(asked)


def test_a_partition_that_is_whole_needs_no_other_file(dealt: tuple[Path, Path]) -> None:
    run, file = dealt
    file.unlink()
    assert _go_on(run).finished
    with pytest.raises(UsageError, match="clients was 2 and is now 3"):
        fedu2.train(_minute(clients=3), fedu2.train(_minute(rounds=1), run.parent / "plain").path, resume=True)


# What a user may lose


def test_a_comparison_without_its_configuration_goes_on(run: Path) -> None:
    assert main(["train", "--resume", "--compare", "--out", str(run)]) == 0
    whole = (run / "fedavg" / "config.yaml").read_bytes()
    (run / "fedavg" / "config.yaml").unlink()
    assert main(["train", "--resume", "--compare", "--out", str(run)]) == 0
    assert (run / "fedavg" / "config.yaml").read_bytes() == whole


def test_what_was_made_of_a_run_is_not_deleted(run: Path) -> None:
    shutil.rmtree(run / "checkpoint")
    (run / "config.yaml").unlink()
    (run / "evaluation.json").write_text("precious")
    (run / "report.html").write_text("precious")
    before = {path.name: path.read_bytes() for path in run.iterdir() if path.is_file()}
    with pytest.raises(UsageError, match="is not empty"):
        fedu2.train(_minute(), run)
    assert {path.name: path.read_bytes() for path in run.iterdir() if path.is_file()} == before


def test_a_run_that_begins_anew_tells_what_it_removes(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    shutil.rmtree(run / "checkpoint")
    (run / "metrics.jsonl").write_text('{"round": 0}\n')
    for name in ("evaluation.json", "report.html"):
        (run / name).write_text("[]")
    fedu2.train(_minute(seed=5), run)
    assert not (run / "evaluation.json").exists()
    assert "evaluation.json is of a run that did not get beyond its first evaluation, and is removed" in caplog.text
    assert (run / "report.html").read_text() == "[]"


def test_files_of_the_users_own_are_no_checkpoints_and_no_drafts(run: Path) -> None:
    own = [run / "checkpoint" / name for name in ("round-000002-keep", ".round-best", "round-x")]
    for folder in own:
        folder.mkdir()
    (run / ".config.yaml.swp").write_text("of an editor")
    assert _go_on(run).finished
    assert all(folder.is_dir() for folder in own)
    assert (run / ".config.yaml.swp").exists()


def test_drafts_of_records_do_not_stay(run: Path) -> None:
    draft = run / "checkpoint" / f".metrics.jsonl.{'0a' * 16}"
    draft.write_text("half")
    _go_on(run)
    assert not draft.exists()


# Locks and names


def test_a_run_whose_lock_is_taken_away_stops(tmp_path: Path) -> None:
    out = tmp_path / "run"

    class Careless(Callback):
        def on_round(self, record: Mapping[str, Any]) -> None:
            if record["round"] == 1:
                (out / ".lock").unlink()
                fedu2.train(_minute(), out, resume=True)  # another process would be let in, too

    with pytest.raises(TrainingError, match=r"\.lock was removed or replaced, and another process may be at work"):
        fedu2.train(_minute(), out, callbacks=[Careless()])
    assert [record["round"] for record in fedu2.Run(out).history] == [0, 1, 2]


def test_two_runs_of_the_same_second_have_names_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Still(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> Still:
            return cls(2026, 1, 31)

    monkeypatch.setattr("fedu2.rundir.datetime", Still)
    names = {RunDirectory.new_name(_minute(), tmp_path / "runs") for _ in range(3)}
    assert len(names) == 3
    assert all(path.is_dir() for path in names)


def test_runs_of_ablations_are_named_after_what_they_do_without(tmp_path: Path) -> None:
    whole = Experiment(method="fedu2", objective="simclr", aggregator="eua", dataset="sample")
    ablations = [whole, whole.with_(fur__weight=0.0), whole.with_(fur__weight=0.0, aggregator="fedavg")]
    names = [RunDirectory.new_name(each, tmp_path).name.partition("-")[2].partition("-")[2] for each in ablations]
    assert names == ["fedu2-simclr-sample", "fedu2-simclr-without-fur-sample", "fedu2-simclr-without-fur-eua-sample"]


def test_a_run_that_cannot_begin_leaves_no_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["train", "dataset=sample", "clients=100000"]) == 1
    assert not list(tmp_path.glob("runs/*"))


# Ctrl-C


class _CtrlC(Callback):
    """Comes in a local epoch of a round."""

    def __init__(self, round_: int) -> None:
        self.round = round_

    def on_epoch(self, report: Any) -> None:
        if report.task.round == self.round:
            raise KeyboardInterrupt


def test_ctrl_c_saves_the_last_whole_round(tmp_path: Path) -> None:
    experiment = _minute(checkpoint_every=50, rounds=4)
    with pytest.raises(KeyboardInterrupt):
        fedu2.train(experiment, tmp_path / "run", callbacks=[_CtrlC(4)])
    assert [path.name for path in (tmp_path / "run" / "checkpoint").glob("round-*")] == ["round-000003"]
    whole, resumed = fedu2.train(experiment, tmp_path / "whole"), fedu2.train(experiment, tmp_path / "run", resume=True)
    states = [(path / "checkpoint/round-000004/server.safetensors").read_bytes() for path in (whole.path, resumed.path)]
    assert states[0] == states[1]


@pytest.mark.parametrize("moment", ["before", "after"])
def test_ctrl_c_while_a_checkpoint_is_written_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    save, experiment = Checkpoints.save, _minute(rounds=4, checkpoint_every=2)

    def disturbed(*told: Any) -> Path:
        if moment == "before":
            signal.raise_signal(signal.SIGINT)
        place = save(*told)
        if moment == "after":
            signal.raise_signal(signal.SIGINT)
        return place

    with monkeypatch.context() as patch:
        patch.setattr(Checkpoints, "save", disturbed)
        with pytest.raises(KeyboardInterrupt):
            fedu2.train(experiment, tmp_path / "run")
    assert [path.name for path in (tmp_path / "run" / "checkpoint").iterdir() if path.is_dir()] == ["round-000002"]
    records = (tmp_path / "run" / "checkpoint" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["round"] for line in records] == [0, 1, 2]
    assert fedu2.train(experiment, tmp_path / "run", resume=True).finished


def test_what_is_not_interrupted_is_interrupted_after_it() -> None:
    done = []

    def disturbed() -> None:
        with uninterrupted():
            signal.raise_signal(signal.SIGINT)
            done.append(1)

    with pytest.raises(KeyboardInterrupt):
        disturbed()
    assert done
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_ctrl_c_many_times_is_one_line(tmp_path: Path) -> None:
    out = tmp_path / "run"
    settings = [f"{key}={value}" for key, value in {**MINUTE, "dataset": "sample", "rounds": 10000}.items()]
    command = [sys.executable, "-m", "fedu2", "train", "--out", str(out), *settings]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        until = time.monotonic() + 180
        while not list(out.glob("checkpoint/round-*")) and process.poll() is None and time.monotonic() < until:
            time.sleep(0.02)
        while process.poll() is None and time.monotonic() < until:  # also while the interpreter ends
            process.send_signal(signal.SIGINT)
            time.sleep(0.003)
    finally:
        process.kill()
        said = process.communicate()[1]
    assert process.returncode == 130, said
    assert said == f"fedu2: interrupted; continue with: fedu2 train --resume --out {out}\n"


@pytest.mark.parametrize(
    "ending",
    [
        {"optimizer__schedule": "cosine"},
        {"byol__momentum_schedule": "cosine"},
        {"fur__schedule": "cosine"},
        {"server__lr": 2, "server__until": 0.5},
        {"eua__until": 0.5},
    ],
)
def test_a_run_whose_schedule_has_an_end_is_not_prolonged(tmp_path: Path, ending: dict[str, Any]) -> None:
    run = fedu2.train(_minute(**ending), tmp_path / "run").path
    with pytest.raises(UsageError, match=r"rounds was 2 and is now 3; its schedules end with the last round"):
        _go_on(run)
