"""The crash matrix in brief; `make torture` is the whole of it."""

from __future__ import annotations

import importlib
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from fedu2.files import seal, unseal

ROOT = Path(__file__).parent.parent


@pytest.mark.skipif(sys.platform != "linux", reason="counts on Linux: namespaces, capabilities, limits on files")
def test_whatever_befalls_a_run_it_ends_the_same_or_says_why_not() -> None:
    """Eight kills, and a seeded sample of damaged files, small disks, read-only directories and rivals."""
    command = [sys.executable, "-m", "torture", "--brief", "--kills", "8", "--method", "fedema", "--seed", "1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = re.findall(
        r"^fedema: (killed|.* of a checkpoint|disk full|file too large|.* read-only|second process).*? +(\d+) ",
        done.stdout,
        re.MULTILINE,
    )
    kills = [int(times) for kind, times in rows if kind == "killed"]
    assert sum(kills) == 8
    assert len(kills) == 3, done.stdout  # inside a write, at a file operation, at a time
    assert len({kind for kind, _ in rows}) >= 6, done.stdout
    assert re.search(r"^fedema: newest checkpoint damaged +2 +2 +0$", done.stdout, re.MULTILINE), done.stdout


@pytest.fixture
def torturers(monkeypatch: pytest.MonkeyPatch) -> tuple[ModuleType, ModuleType]:
    """`damage` and `kills`, whose children are not begun here: the test says how they end."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # which the import sets for good
    return importlib.import_module("torture.damage"), importlib.import_module("torture.kills")


def test_the_matrix_wants_a_predecessor_of_a_damaged_checkpoint(
    torturers: tuple[ModuleType, ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That a run is refused with the file's name is enough only where no whole checkpoint is left."""
    damage, kills = torturers
    state = tmp_path / "state"
    for place in ("round-000001", "round-000002"):
        (state / "checkpoint" / place).mkdir(parents=True)
        (state / "checkpoint" / place / "server.safetensors").write_bytes(b"weights")
    subject = SimpleNamespace(folder=tmp_path, resume=lambda run: [])
    reference = SimpleNamespace(method="m", subject=subject, result={})
    refusal = kills.Outcome(1, "fedu2: no checkpoint is whole: server.safetensors is damaged\n")
    monkeypatch.setattr(damage, "run_command", lambda *_: refusal)
    tally = damage.Tally()
    damage._newest_checkpoint(reference, state, tally)
    damage._all_checkpoints(reference, state, tally)
    assert tally.rows == {"m: newest checkpoint damaged": {"broken": 1}, "m: all checkpoints damaged": {"refused": 1}}


def test_kills_follow_from_the_seed_and_not_from_the_clock(
    torturers: tuple[ModuleType, ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kill that comes too late changes nothing about the kills of later trials."""
    _, kills = torturers
    subject = SimpleNamespace(folder=tmp_path, begin=lambda run, _: [run.name], resume=lambda run: [run.name])
    reference = SimpleNamespace(method="m", subject=subject, result={}, seconds=1.0, operations=80, sizes=[9, 700])
    reference.play_on = lambda run: (kills.Outcome(0, ""), False)
    for name, place in {"at_operation": 1, "cut_writes": 0}.items():  # told by what they were asked for
        monkeypatch.setattr(kills, name, lambda *asked, name=name, place=place: (name, asked[place], *asked[2:]))
    monkeypatch.setattr(kills, "differences", lambda *_: [])

    def struck(late: set[str]) -> dict[str, list[object]]:
        seen: dict[str, list[object]] = {}

        def run_command(command: list[str], fate: object = None, kill_after: float | None = None) -> object:
            seen.setdefault(command[0], []).append(fate or kill_after)
            return kills.Outcome(0 if command[0] in late else -signal.SIGKILL, "")

        monkeypatch.setattr(kills, "run_command", run_command)
        kills.kill(reference, 40, 1, kills.Tally())
        return seen

    punctual, late = struck(set()), struck({"killed-1", "killed-3"})
    assert len({str(fate) for fates in punctual.values() for fate in fates}) > 30
    assert all(late[f"killed-{n}"] == punctual[f"killed-{n}"] for n in (2, 4, 5, 6))
    assert late["killed-1"] == punctual["killed-1"][:1]


def test_a_seal_notices_every_changed_byte() -> None:
    sealed = seal("rounds: 4\n")
    assert unseal(sealed) == "rounds: 4\n"
    assert unseal("rounds: 4\n") == "rounds: 4\n"  # of an earlier version
    for place, letter in enumerate(sealed):
        for change in range(1, 128):
            with pytest.raises(ValueError, match="checksum"):
                unseal(sealed[:place] + chr(ord(letter) ^ change) + sealed[place + 1 :])
