"""What is the same bit for bit, and what is not: the claims of docs/reproducibility.md that no other file tests."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import fedu2
from fedu2.data import load_dataset
from fedu2.experiment import Experiment
from fedu2.federation.callbacks import Callback
from fedu2.federation.local import LocalBackend
from fedu2.federation.rounds import initial_state
from fedu2.methods import Reply, Task, build, resolve

ROOT = Path(__file__).parents[1]
CLOCKS = {"seconds", "samples_per_second", "evaluation_seconds"}


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


SMALL = {
    "dataset": "sample", "data.image_size": 16, "clients": 3, "alpha": 1.0, "participation": 0.7, "encoder": "tiny",
    "width": 4, "rounds": 2, "local_steps": 2, "batch_size": 32, "byol.target": "local", "evaluation.every": 0,
    "engine.threads": 1,
}  # fmt: skip


def _weights(run: fedu2.Run, pattern: str = "*") -> bytes:
    newest = max((run.path / "checkpoint").glob("round-*"))
    files = sorted(newest.glob(f"{pattern}.safetensors"))
    assert files
    return b"".join(path.name.encode() + path.read_bytes() for path in files)


def _figures(run: fedu2.Run) -> list[dict]:
    return [{name: value for name, value in record.items() if name not in CLOCKS} for record in run.history]


@pytest.fixture(scope="module")
def once(tmp_path_factory: pytest.TempPathFactory) -> fedu2.Run:
    """Two rounds with all that FedU² draws: order, views, references, participants."""
    return fedu2.train(Experiment.parse(SMALL), tmp_path_factory.mktemp("runs") / "once")


def test_another_process_gives_the_same_bits(once: fedu2.Run, tmp_path: Path) -> None:
    """With other hashes of strings, and after other work of the same process: the second run here is not its first.

    Nor does it import torch's compiler, which takes as long as torch itself: sites start a process for every message.
    """
    code = (
        "import fedu2, sys; fedu2.train(fedu2.Experiment.load(sys.argv[1]), sys.argv[2]);"
        "assert 'torch._dynamo' not in sys.modules"
    )
    command = [sys.executable, "-c", code, str(once.path / "config.yaml"), str(tmp_path / "there")]
    subprocess.run(command, check=True, env={**os.environ, "PYTHONHASHSEED": "7"}, timeout=300)
    here = fedu2.train(once.experiment, tmp_path / "here")
    for again in (here, fedu2.Run(tmp_path / "there")):
        assert _weights(again) == _weights(once)
        assert _figures(again) == _figures(once)


def test_threads_change_the_rounding_and_no_more(micro: Experiment) -> None:
    """Two threads give the same bits every time. They may differ from those of one, by what rounding makes of it."""
    method = build(resolve(Experiment.parse(micro.flat(), ["width=8", "batch_size=64"])))  # large enough to be shared
    backend = LocalBackend(method, load_dataset("sample", method.experiment.data).train, [torch.arange(200)])
    server = initial_state(method, "cpu").server

    def reply(threads: int) -> Reply:
        torch.set_num_threads(threads)
        (found,) = backend.run([Task(1, 0, 1, 0.01, 0.0)], server, {}, Callback())
        return found

    one, two, again = reply(1), reply(2), reply(2)
    assert torch.equal(two.model.params, again.model.params)
    assert torch.equal(two.model.buffers, again.model.buffers)
    assert two.metrics == again.metrics
    assert two.metrics["loss"] == pytest.approx(one.metrics["loss"], rel=1e-4)
    assert (two.model.params - one.model.params).norm() < 1e-3 * (one.model.params - server.model.params).norm()


def test_what_is_looked_at_and_saved_does_not_reach_the_weights(once: fedu2.Run, tmp_path: Path) -> None:
    often = fedu2.train(once.experiment.with_(evaluation__every=1, checkpoint_every=2), tmp_path / "often")
    for pattern in ("server", "client-*"):  # the best round is another when more are judged
        assert _weights(often, pattern) == _weights(once, pattern)
    ours, theirs = _figures(often), _figures(once)
    judged = {name for name in theirs[0] if name != "round"}
    assert {"knn", "effective_rank"} <= judged
    assert judged <= ours[1].keys()
    assert not judged & theirs[1].keys()
    ours[1] = {name: value for name, value in ours[1].items() if name not in judged}
    assert ours == theirs


def test_a_run_that_was_prolonged_differs_by_its_earlier_end(once: fedu2.Run, tmp_path: Path) -> None:
    """The last round is judged whatever `evaluation.every`, and may be the best: nothing else remembers it."""
    short = fedu2.train(once.experiment.with_(rounds=1), tmp_path / "run")
    longer = fedu2.train(once.experiment, short.path, resume=True)
    for pattern in ("server", "client-*"):
        assert _weights(longer, pattern) == _weights(once, pattern)
    assert "knn" in longer.history[1]
    assert "knn" not in once.history[1]
    ours, theirs = _figures(longer), _figures(once)
    assert (ours[0], ours[2]) == (theirs[0], theirs[2])


def test_the_page_names_tests_that_exist() -> None:
    page = (ROOT / "docs" / "reproducibility.md").read_text()
    named = re.findall(r"`(tests/\w+\.py)::(\w+)`", page)
    assert len(named) >= 10
    missing = [f"{file}::{name}" for file, name in named if f"def {name}(" not in (ROOT / file).read_text()]
    assert not missing
