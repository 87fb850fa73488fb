"""What a site remembers on its own disk: what is damaged or lost is told, and what is legitimate goes on."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

pytest.importorskip("flwr")

from fedu2.errors import TrainingError
from fedu2.experiment import Experiment
from fedu2.federation.flower import backend as flower_backend
from fedu2.federation.flower import memory as disk
from fedu2.federation.flower.client_app import app
from fedu2.federation.flower.memory import DiskMemory
from fedu2.federation.flower.server import serve
from fedu2.federation.flower.site import Site, site_of
from fedu2.federation.flower.wire import Assignment
from fedu2.federation.rounds import initial_state
from fedu2.files import digest_of
from fedu2.methods import Memory, Task, build
from flower_grid import LocalGrid

TOLD = "it has trouble with its training; its own log says more"


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flower_backend, "PAUSE", 0.01)


def _remembered(*rounds: int) -> Memory:
    return {"rounds": torch.tensor(rounds), "weights": torch.linspace(0, 1, 50)}


def _filled(folder: Path, *rounds: int) -> DiskMemory:
    memories = DiskMemory(folder)
    for made in rounds:
        memories.write(made, _remembered(made))
    return memories


def _file(folder: Path, round_: int) -> Path:
    (path,) = folder.glob(f"round-{round_:06d}-*")
    return path


def _made(memory: Memory) -> int:
    return int(memory["rounds"])


# Harm


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-2] ^= 1
    path.write_bytes(content)


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-4])


def _lengthen(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0")


def _foreign(path: Path) -> None:
    save_file(_remembered(77), path)


def _all_gone(path: Path) -> None:
    for other in path.parent.glob("*.safetensors"):
        other.unlink()


def _manifest(harm: Callable[[Path], None]) -> Callable[[Path], None]:
    return lambda path: harm(path.with_name("manifest.json"))


def _unlisted(path: Path) -> None:
    """A manifest that was edited, so that the memory before is the newest."""
    manifest = json.loads(path.read_text())
    del manifest["memories"]["2"]
    path.write_text(json.dumps(manifest))


def _leading_out(path: Path) -> None:
    manifest = json.loads(path.read_text())
    manifest["memories"]["2"]["file"] = "../round-000002.safetensors"
    del manifest["digest"]
    path.write_text(json.dumps({**manifest, "digest": digest_of(manifest)}))


HARMS: dict[str, tuple[Callable[[Path], None], str]] = {
    "flip": (_flip, r"round-000002-\w+\.safetensors is damaged"),
    "truncate": (_truncate, r"round-000002-\w+\.safetensors is damaged"),
    "lengthen": (_lengthen, r"round-000002-\w+\.safetensors is damaged"),
    "foreign file": (_foreign, r"round-000002-\w+\.safetensors is damaged"),
    "newest gone": (Path.unlink, r"round-000002-\w+\.safetensors is missing"),
    "all gone": (_all_gone, r"round-000002-\w+\.safetensors is missing"),
    "manifest flipped": (_manifest(_flip), r"manifest\.json is damaged"),
    "manifest truncated": (_manifest(_truncate), r"manifest\.json is damaged"),
    "manifest edited": (_manifest(_unlisted), r"manifest\.json is damaged"),
    "manifest leads out": (_manifest(_leading_out), r"manifest\.json is damaged"),
    "manifest gone": (_manifest(Path.unlink), r"manifest\.json is missing"),
}


@pytest.mark.parametrize("harm", HARMS)
def test_what_is_damaged_or_lost_is_refused_by_name(tmp_path: Path, harm: str) -> None:
    memories = _filled(tmp_path / "site", 1, 2)
    assert memories.rounds() == [1, 2]
    assert _made(memories.read(2)) == 2
    spoil, complaint = HARMS[harm]
    spoil(_file(memories.folder, 2))
    with pytest.raises(TrainingError, match=complaint):
        memories.read(max(memories.rounds()))


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Experiment]:
    """A run of two rounds whose three sites keep memories, to be copied and harmed."""
    place = tmp_path_factory.mktemp("played")
    values = {
        "data.image_size": 16, "clients": 3, "partition": "iid", "encoder": "tiny", "width": 4, "rounds": 2,
        "local_steps": 2, "batch_size": 32, "evaluation.every": 0, "method": "fedema",
    }  # fmt: skip
    experiment = Experiment.parse(values)
    serve(_grid(place), experiment, place / "run")
    return place, experiment


def _grid(place: Path) -> LocalGrid:
    return LocalGrid(app, {100 + k: {"partition-id": k, "memory": str(place / "memory")} for k in range(3)})


def _site_folder(place: Path) -> Path:
    (folder,) = place.glob("memory/*/partition-1")
    return folder


@pytest.mark.parametrize("harm", ["flip", "newest gone", "all gone"])
def test_a_server_is_told_and_goes_on_without_the_site(
    played: tuple[Path, Experiment], tmp_path: Path, harm: str, caplog: pytest.LogCaptureFixture
) -> None:
    place = Path(shutil.copytree(played[0], tmp_path / "copy"))
    spoil, _ = HARMS[harm]
    spoil(_file(_site_folder(place), 2))
    run = serve(_grid(place), played[1].with_(rounds=3), place / "run")
    assert run.history[-1]["clients"] == [0, 2]
    assert run.history[-1]["left_out"] == {"1": TOLD}
    assert f"what this site remembers in {_site_folder(place)} cannot be used" in caplog.text
    assert str(place) not in (run.path / "metrics.jsonl").read_text()


def test_a_site_without_its_folder_begins_anew_and_says_so(
    played: tuple[Path, Experiment], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    place = Path(shutil.copytree(played[0], tmp_path / "copy"))
    shutil.rmtree(_site_folder(place))
    run = serve(_grid(place), played[1].with_(rounds=3), place / "run")
    assert run.history[-1]["clients"] == [0, 1, 2]
    told = [line for line in caplog.messages if "begins anew" in line]
    assert told == ["site partition-1 remembers nothing from before round 3: it begins anew"]


# What is legitimate


def test_memories_of_the_version_before_are_taken_with_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for made in (1, 2):
        save_file(_remembered(made), tmp_path / f"round-{made:06d}.safetensors")
    memories = DiskMemory(tmp_path)
    assert memories.rounds() == [1, 2]
    assert _made(memories.read(2)) == 2
    memories.write(3, _remembered(3))
    memories.write(2, _remembered(22))  # played again
    memories.forget(1)
    assert [_made(memories.read(made)) for made in (2, 3)] == [22, 3]
    assert not list(tmp_path.glob("round-00000[12].safetensors"))
    assert [record.levelno for record in caplog.records] == [logging.WARNING]


def test_memories_of_the_version_before_are_sealed_at_first_sight(tmp_path: Path) -> None:
    save_file(_remembered(1), path := tmp_path / "round-000001.safetensors")
    DiskMemory(tmp_path).rounds()
    _flip(path)
    with pytest.raises(TrainingError, match=r"round-000001\.safetensors is damaged"):
        DiskMemory(tmp_path).read(1)


def test_files_of_others_are_left_alone(tmp_path: Path) -> None:
    others = [tmp_path / name for name in ("notes.txt", "round-x.safetensors", "round-1.safetensors")]
    for path in others:
        path.write_text("mine")
    memories = _filled(tmp_path, 1, 2)
    others.append(tmp_path / "round-000009.safetensors")  # no manifest names it
    others[-1].write_text("mine")
    memories.write(3, _remembered(3))
    memories.forget(1)
    assert memories.rounds() == [1, 2, 3]
    assert _made(memories.read(3)) == 3
    assert all(path.read_text() == "mine" for path in others)


@pytest.mark.parametrize("before", [(), (1,), (1, 2)])
def test_a_crash_before_the_manifest_leaves_what_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: tuple[int, ...]
) -> None:
    class Killed(BaseException):
        pass

    def kill(path: Path, text: str) -> None:
        if '"2"' in text:
            raise Killed
        write(path, text)

    memories, write = _filled(tmp_path, *before), disk.write_atomically
    with monkeypatch.context() as patched:
        patched.setattr(disk, "write_atomically", kill)
        with pytest.raises(Killed):
            memories.write(2, _remembered(22))
    assert len(list(tmp_path.glob("*.safetensors"))) == len(before) + 1
    assert memories.rounds() == list(before)
    assert [_made(memories.read(made)) for made in before] == list(before)
    memories.write(2, _remembered(222))
    assert _made(memories.read(2)) == 222
    assert len(list(tmp_path.glob("*.safetensors"))) == len({*before, 2})  # the leftover is gone


def test_who_is_set_back_behind_all_that_is_kept_is_told(tmp_path: Path) -> None:
    memories = _filled(tmp_path, 2, 3, 4, 5)
    for made in (2, 3):
        memories.forget(made)
    assert memories.rounds() == [2, 4, 5]
    with pytest.raises(TrainingError, match="the memory after round 2 is not kept any more"):
        memories.read(2)
    assert _made(memories.read(4)) == 4


def test_a_server_that_begins_again_is_followed(tmp_path: Path) -> None:
    memories = _filled(tmp_path, 2, 3, 4)
    memories.forget(2)
    memories.write(1, _remembered(1))
    for made in (2, 3, 4):
        memories.forget(made)
    assert memories.rounds() == [1]
    assert _made(memories.read(1)) == 1


def test_a_site_that_was_absent_has_what_a_server_that_is_set_back_asks_for(
    micro: Experiment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rounds 2, 7, 12 and 15, with checkpoints after 5 and 10; then the one after 10 is damaged."""
    experiment = micro.with_(method="fedema", aggregator="fedavg", checkpoint_every=5)
    site: Site = site_of(experiment, {"partition-id": 0})
    server = initial_state(build(experiment), "cpu").server
    asked = Assignment("run", Task(1, 0, 1, 0.1, 0.0), server, experiment)

    def play(round_: int) -> Any:
        return site.work(replace(asked, task=replace(asked.task, round=round_)), memories).model.params

    memories, read, seen = DiskMemory(tmp_path / "site"), DiskMemory.read, []
    monkeypatch.setattr(DiskMemory, "read", lambda self, made: seen.append(made) or read(self, made))
    first = {round_: play(round_) for round_ in (2, 7, 12, 15)}
    again = {round_: play(round_) for round_ in (7, 12, 15)}
    assert seen == [2, 7, 12, 2, 7, 12]
    assert all(torch.equal(again[round_], first[round_]) for round_ in again)
    play(30)
    assert memories.rounds() == [2, 15, 30]  # of the first it is known that there was one
