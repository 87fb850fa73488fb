"""Several processes: the same result as one, and an end in words when one of them fails. Real processes, real gloo."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

import fedu2
from fedu2.experiment import Experiment
from fedu2.federation.processes import deal, join, own_device
from fedu2.methods import Task

DRIVER = Path(__file__).with_name("processes_driver.py")
LONGEST = 180  # seconds that a run may take on a busy machine before it counts as hanging

CLOCKS = ("seconds", "samples_per_second", "evaluation_seconds")


@dataclass(frozen=True)
class Ended:
    """How the processes of a run ended, by rank."""

    codes: list[int]
    errors: list[str]


def _start(processes: int, *arguments: str) -> Ended:
    """Start what torchrun would start, but keep each process's exit code and stderr apart."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = {"WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes), "OMP_NUM_THREADS": "1"}
    shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    started = [
        subprocess.Popen(
            [sys.executable, *arguments],
            env={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(processes)
    ]
    try:
        errors = [process.communicate(timeout=LONGEST)[1] for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait()
    return Ended([process.returncode for process in started], errors)


def _torchrun(processes: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run([*launcher, *arguments], env=environment, capture_output=True, text=True, timeout=LONGEST)


def _files(run: Path) -> dict[str, bytes]:
    """The weights of the last checkpoints, of the server and of every client that remembers."""
    return {str(path.relative_to(run)): path.read_bytes() for path in run.glob("checkpoint/*/*.safetensors")}


def _history(run: Path) -> list[dict]:
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in record.items() if k not in CLOCKS} for record in records]


def _said(ended: Ended) -> list[str]:
    """All that the processes told the user."""
    return [line for error in ended.errors for line in error.splitlines() if not line.startswith("trained here:")]


@pytest.fixture
def config(micro: Experiment, tmp_path: Path) -> Path:
    """FedBYOL, whose clients remember their targets, with three of five clients a round."""
    settings = ["method=fedbyol", "clients=5", "participation=0.6", "rounds=3"]
    path = tmp_path / "config.yaml"
    path.write_text(Experiment.parse(micro.flat(), settings).to_yaml())
    return path


def test_several_processes_give_what_one_gives(config: Path, tmp_path: Path) -> None:
    processes = 3
    alone = fedu2.train(Experiment.load(config), tmp_path / "alone").path
    assert len(list(alone.glob("checkpoint/round-000003/client-*"))) == 5  # everybody took part and remembers
    together = tmp_path / "together"
    ended = _torchrun(processes, str(DRIVER), str(config), str(together))
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr.count("trained here:") == 3 * processes  # in every round every process trained
    assert _files(together) == _files(alone)
    assert _history(together) == _history(alone)


def test_a_nan_at_a_follower_is_one_sentence(config: Path, tmp_path: Path) -> None:
    ended = _start(2, str(DRIVER), str(config), str(tmp_path / "run"), "nan")
    (sentence,) = _said(ended)
    assert sentence.startswith("fedu2: loss became nan in round 2, client ")
    assert sentence.endswith("round-000001")  # the last good checkpoint
    assert ended.codes == [1, 0]


def test_a_bug_at_a_follower_names_the_process_and_keeps_its_traceback(config: Path, tmp_path: Path) -> None:
    ended = _start(2, str(DRIVER), str(config), str(tmp_path / "run"), "bug")
    told = [line for line in _said(ended) if line.startswith("fedu2: ")]
    assert len(told) == 1
    assert told[0].startswith("fedu2: process 1 failed: ValueError: no such thing; the last good checkpoint")
    assert "Traceback" not in ended.errors[0]
    assert "Traceback" in ended.errors[1]
    assert ended.codes == [1, 0]


def test_a_killed_follower_ends_the_run(config: Path, tmp_path: Path) -> None:
    """Within LONGEST, start included: the leader notices, it does not wait for a time limit of hours."""
    ended = _start(3, str(DRIVER), str(config), str(tmp_path / "run"), "killed")
    (sentence,) = _said(ended)
    assert sentence.startswith("fedu2: process 2 has ended unexpectedly; the last good checkpoint is ")
    assert ended.codes == [1, 0, -9]


def test_a_failing_leader_ends_its_followers(config: Path, tmp_path: Path) -> None:
    """Here before there is anything to do: the directory is taken."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.tex").write_text("precious")
    ended = _start(2, str(DRIVER), str(config), str(tmp_path / "run"))
    (sentence,) = _said(ended)
    assert "is not empty" in sentence
    assert ended.codes == [2, 0]


def test_an_interrupted_leader_ends_its_followers(config: Path, tmp_path: Path) -> None:
    ended = _start(2, str(DRIVER), str(config), str(tmp_path / "run"), "interrupted")
    (sentence,) = _said(ended)
    assert sentence == "fedu2: interrupted"
    assert ended.codes == [130, 0]


def test_the_module_runs_by_its_name(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "fedu2", "train", "roundz=3"]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=LONGEST)
    assert (ended.returncode, ended.stderr) == (2, "fedu2: unknown key 'roundz'; did you mean 'rounds'?\n")


def test_longest_tasks_first_onto_the_least_loaded_process() -> None:
    def dealt(steps: list[int], processes: int) -> list[int]:
        return deal([Task(1, client, count, 0.1, 0.0) for client, count in enumerate(steps)], processes)

    assert dealt([1, 2, 3, 6], 2) == [1, 1, 1, 0]
    assert dealt([5, 5, 5], 3) == [0, 1, 2]
    assert dealt([4], 3) == [0]
    assert dealt([], 2) == []
    assert dealt([3, 1, 4, 1, 5], 1) == [0] * 5


def test_alone_there_is_nobody_to_join(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    join.cache_clear()
    assert join() is None


@pytest.mark.parametrize(
    ("asked", "gpus", "mine"),
    [("cuda", 4, "cuda:1"), ("cuda", 2, "cuda:1"), ("cuda", 1, "cuda"), ("cuda:0", 4, "cuda:0"), ("cpu", 4, "cpu")],
)
def test_every_process_has_its_gpu_where_there_are_enough(
    monkeypatch: pytest.MonkeyPatch, asked: str, gpus: int, mine: str
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    assert own_device(torch.device(asked)) == torch.device(mine)


def test_a_wrong_key_is_one_line_and_ends_everybody() -> None:
    ended = _start(2, "-m", "fedu2", "train", "roundz=3")
    assert _said(ended) == ["fedu2: unknown key 'roundz'; did you mean 'rounds'?"]
    assert ended.codes == [2, 0]
