from __future__ import annotations

import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import fedu2
from fedu2.commands import experiment_from
from fedu2.console import result_table
from fedu2.data import load_dataset, make_partition
from fedu2.errors import TrainingError, UsageError
from fedu2.experiment import Experiment
from fedu2.federation.callbacks import Callback, TensorBoard
from fedu2.federation.checkpoint import Checkpoints
from fedu2.federation.local import LocalBackend
from fedu2.federation.rounds import FederationState, initial_state, participants, play_round
from fedu2.files import seal, unseal
from fedu2.methods import Method, Reply, ServerState, Task, build, resolve

ALL = [
    ["method=fedsimclr"],
    ["method=fedsimsiam"],
    ["method=fedbyol"],
    *(["method=fedu2", f"objective={objective}"] for objective in ("simclr", "simsiam", "byol")),
    *(["method=fedu2", "fur.weight=0", f"objective={objective}"] for objective in ("simclr", "simsiam", "byol")),
    *(["method=fedu2", "aggregator=fedavg", f"objective={objective}"] for objective in ("simclr", "simsiam", "byol")),
]


Trained = Callable[[Experiment, Path], fedu2.Run]


def _with(experiment: Experiment, *settings: str) -> Experiment:
    return Experiment.parse(experiment.flat(), list(settings))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """A finished run, at the place where it is wanted: many tests begin with the same one, and get a copy of it."""
    runs: dict[str, Path] = {}

    def at(experiment: Experiment, out: Path) -> fedu2.Run:
        text = experiment.to_yaml()
        if text not in runs:
            runs[text] = fedu2.train(experiment, tmp_path_factory.mktemp("trained") / "run").path
        return fedu2.Run(shutil.copytree(runs[text], out))

    return at


def _weights(path: Path) -> bytes:
    newest = max((path / "checkpoint").glob("round-*"))
    files = sorted(newest.glob("*.safetensors"))
    return b"".join(file.name.encode() + file.read_bytes() for file in files)


def _rewrite_manifest(place: Path, **entries: object) -> None:
    """Change entries as an earlier version might have written them, which knew no digest."""
    path = place / "manifest.json"
    content = {**json.loads(path.read_text()), **entries}
    assert content.pop("digest")
    path.write_text(json.dumps(content))


def _without_records(run: Path) -> None:
    """Checkpoints as earlier versions wrote them: without a copy of metrics.jsonl."""
    (run / "checkpoint" / "metrics.jsonl").unlink(missing_ok=True)
    for place in (run / "checkpoint").glob("round-*"):
        if json.loads((place / "manifest.json").read_text()).get("metrics"):
            _rewrite_manifest(place, metrics=None)


def _without_clocks(history: list[dict]) -> list[dict]:
    clocks = {"seconds", "samples_per_second", "evaluation_seconds"}
    return [{key: value for key, value in record.items() if key not in clocks} for record in history]


def _setting(experiment: Experiment) -> tuple[Method, LocalBackend, FederationState, list[int]]:
    experiment = resolve(experiment)
    dataset = load_dataset(experiment.dataset, experiment.data)
    shares = make_partition(dataset, experiment)
    method = build(experiment)
    backend = LocalBackend(method, dataset.train, shares)
    return method, backend, initial_state(method, "cpu"), [len(share) for share in shares]


@pytest.mark.parametrize("settings", ALL, ids=" ".join)
def test_every_method_trains_and_writes_a_run(micro: Experiment, tmp_path: Path, settings: list[str]) -> None:
    run = fedu2.train(_with(micro, *settings), tmp_path / "run")
    assert [record["round"] for record in run.history] == [0, 1, 2]
    assert 0 < run.summary["knn"] <= 100
    assert run.summary["knn"] == run.history[-1]["knn"]
    assert run.summary["untrained_knn"] == run.history[0]["knn"]
    assert run.summary["best"]["knn"] == max(run.history[0]["knn"], run.history[-1]["knn"])
    assert run.summary["effective_rank"] >= 1
    last = run.history[-1]
    if "fur.weight=0" not in settings and "method=fedu2" in settings:
        assert 0 < last["fur.mass"] <= 1
        assert 0 <= last["fur.gap"] < 0.2  # of a plan that is smoothed on purpose
    else:
        assert "fur.mass" not in last
    if run.experiment.aggregator == "eua":
        assert len(last["eua.weights"]) == len(last["eua.rates"]) == 3
    images = torch.zeros(2, 3, 16, 16)
    assert run.encoder()(images).shape == (2, 16)


def test_a_clients_update_depends_on_seed_round_and_client_alone(micro: Experiment) -> None:
    _, backend, state, _ = _setting(micro)
    tasks = [Task(1, client, 3, 0.05, 0.0) for client in (0, 1, 2)]

    def updates(order: Sequence[Task]) -> dict[int, Reply]:
        return {reply.client: reply for reply in backend.run(order, state.server, {}, Callback())}

    forward, backward, alone = updates(tasks), updates(tasks[::-1]), updates(tasks[1:2])
    for client in (0, 1, 2):
        assert torch.equal(forward[client].model.params, backward[client].model.params)
        assert torch.equal(forward[client].model.buffers, backward[client].model.buffers)
    assert torch.equal(forward[1].model.params, alone[1].model.params)
    later = updates([Task(2, 1, 3, 0.05, 0.0)])
    assert not torch.equal(later[1].model.params, alone[1].model.params)


@pytest.mark.parametrize(
    "settings",
    [["views.recipe=none", "views.crop_scale=null", "fur.weight=0"], ["batch_size=64"]],
    ids=["order", "views"],
)
def test_clients_with_the_same_images_draw_differently(micro: Experiment, settings: list[str]) -> None:
    """Without random views only the order of images can differ; in one batch of all images, only the views."""
    experiment = resolve(_with(micro, *settings))
    images, share = load_dataset("sample", experiment.data).train, torch.arange(64)
    method = build(experiment)
    backend = LocalBackend(method, images, [share, share])
    tasks = [Task(1, client, 1, 0.05, 0.0) for client in (0, 1)]
    first, second = backend.run(tasks, initial_state(method, "cpu").server, {}, Callback())
    assert (first.model.params - second.model.params).norm() > 1e-3 * first.model.params.norm()


def test_runs_repeat_and_seeds_differ(micro: Experiment, tmp_path: Path) -> None:
    first = fedu2.train(micro, tmp_path / "a")
    again = fedu2.train(micro, tmp_path / "b")
    other = fedu2.train(_with(micro, "seed=1"), tmp_path / "c")
    assert _weights(first.path) == _weights(again.path)
    assert _weights(first.path) != _weights(other.path)


def test_participation_draws_the_share_and_varies() -> None:
    experiment = Experiment.parse({"participation": 0.4})
    drawn = [participants(experiment, 10, r) for r in range(1, 30)]
    assert all(len(set(clients)) == 4 and clients == sorted(clients) for clients in drawn)
    assert len({tuple(clients) for clients in drawn}) > 10
    assert set().union(*map(set, drawn)) == set(range(10))
    assert participants(Experiment.parse({"participation": 0.01}), 10, 1) != []
    assert participants(Experiment(), 5, 1) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("method", ["fedbyol", "fedu2"])
@pytest.mark.parametrize("target", ["local", "shared"])
def test_partial_participation_remembers_absent_clients(
    micro: Experiment, tmp_path: Path, method: str, target: str
) -> None:
    experiment = _with(micro, f"method={method}", f"byol.target={target}", "participation=0.4", "rounds=3")
    run = fedu2.train(experiment, tmp_path / "run")
    assert all(len(record["clients"]) == 1 for record in run.history[1:])
    seen = {record["clients"][0] for record in run.history[1:]}
    newest = max((run.path / "checkpoint").glob("round-*"))
    memories = {int(path.stem[-4:]) for path in newest.glob("client-*")}
    assert memories == (seen if target == "local" else set())


def test_clients_smaller_than_a_batch_train(micro: Experiment, tmp_path: Path) -> None:
    partition = tmp_path / "partition.json"
    partition.write_text(json.dumps([[0, 1], list(range(2, 10)), list(range(10, 80))]))
    experiment = _with(micro, "partition=file", f"split.file={partition}", "local_steps=epochs", "local_epochs=1")
    run = fedu2.train(experiment, tmp_path / "run")
    assert json.loads((run.path / "partition.json").read_text())["clients"][0] == [0, 1]
    assert run.history[-1]["loss"] > 0


@pytest.mark.parametrize("method", ["fedbyol", "fedu2"])
@pytest.mark.parametrize("stop_after", [0, 1, 2])
def test_resume_is_bit_identical(
    micro: Experiment, tmp_path: Path, trained: Trained, method: str, stop_after: int
) -> None:
    experiment = _with(micro, f"method={method}", "rounds=3", "evaluation.every=1")
    whole = trained(experiment, tmp_path / "whole")

    class Stop(Callback):
        def on_epoch(self, report) -> None:
            if report.task.round == stop_after + 1 and report.task.client == 1:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fedu2.train(experiment, tmp_path / "cut", callbacks=[Stop()])
    resumed = fedu2.train(experiment, tmp_path / "cut", resume=True)
    assert _weights(resumed.path) == _weights(whole.path)
    assert _without_clocks(resumed.history) == _without_clocks(whole.history)


def test_kill_9_in_the_middle_of_a_round(micro: Experiment, tmp_path: Path) -> None:
    experiment = _with(micro, "rounds=3", "local_steps=12")
    config = tmp_path / "config.yaml"
    config.write_text(experiment.to_yaml())
    whole = fedu2.train(experiment, tmp_path / "whole")

    out = tmp_path / "killed"
    command = [sys.executable, "-m", "fedu2.cli", "train", "--config", str(config), "--out", str(out)]
    process = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 120
        while not list((out / "checkpoint").glob("round-000002")) and time.monotonic() < deadline:
            assert process.poll() is None, "the run ended before it could be killed"
            time.sleep(0.005)
        time.sleep(0.05)  # into round 3
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert process.returncode == -signal.SIGKILL
    assert not (out / "summary.json").exists()
    resumed = subprocess.run(
        [*command, "--resume"], env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True
    )
    assert resumed.returncode == 0, resumed.stderr
    assert "resuming after round" in resumed.stdout
    assert _weights(out) == _weights(whole.path)


def test_resume_of_a_finished_run_changes_nothing_and_can_go_further(micro: Experiment, tmp_path: Path) -> None:
    micro = _with(micro, "evaluation.every=1")
    run = fedu2.train(micro, tmp_path / "run")
    before = _weights(run.path)
    fedu2.train(micro, run.path, resume=True)
    assert _weights(run.path) == before
    longer = fedu2.train(_with(micro, "rounds=3"), run.path, resume=True)
    straight = fedu2.train(_with(micro, "rounds=3"), tmp_path / "straight")
    assert longer.summary["rounds"] == 3
    assert _weights(longer.path) == _weights(straight.path)


def test_a_checkpoint_of_another_configuration_is_refused(micro: Experiment, tmp_path: Path, trained: Trained) -> None:
    run = trained(micro, tmp_path / "run")
    with pytest.raises(UsageError, match=r"another configuration: seed was 0 and is now 1"):
        fedu2.train(_with(micro, "seed=1"), run.path, resume=True)
    with pytest.raises(UsageError, match="rounds was 2 and is now 3"):
        fedu2.train(_with(micro, "rounds=3", "optimizer.schedule=cosine"), run.path, resume=True)


def test_an_existing_run_is_not_overwritten(micro: Experiment, tmp_path: Path, trained: Trained) -> None:
    run = trained(micro, tmp_path / "run")
    before = _weights(run.path)
    with pytest.raises(UsageError, match="already holds a run: continue it with --resume"):
        fedu2.train(micro, run.path)
    assert _weights(run.path) == before
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").write_text("precious")
    with pytest.raises(UsageError, match="is not empty"):
        fedu2.train(micro, tmp_path / "other")
    with pytest.raises(UsageError, match="holds no run to resume"):
        fedu2.train(micro, tmp_path / "nothing", resume=True)


def test_a_second_process_is_kept_out(micro: Experiment, tmp_path: Path) -> None:
    import fcntl

    (tmp_path / "run").mkdir()
    with (tmp_path / "run" / ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(UsageError, match="in use by another process"):
            fedu2.train(micro, tmp_path / "run")


def test_damaged_checkpoints_fall_back_or_are_named(micro: Experiment, tmp_path: Path, trained: Trained) -> None:
    experiment = _with(micro, "rounds=3")
    run = trained(experiment, tmp_path / "run")
    good = _weights(run.path)
    places = sorted((run.path / "checkpoint").glob("round-*"))
    assert [place.name for place in places] == ["round-000002", "round-000003"]
    newest = places[-1] / "server.safetensors"
    data = bytearray(newest.read_bytes())
    data[-5] ^= 0xFF
    newest.write_bytes(data)
    fedu2.train(experiment, run.path, resume=True)  # plays round 3 again
    assert _weights(run.path) == good
    for place in (run.path / "checkpoint").glob("round-*"):
        (place / "server.safetensors").write_bytes(b"short")
    with pytest.raises(TrainingError, match=r"server\.safetensors is damaged"):
        fedu2.train(experiment, run.path, resume=True)


def test_a_nan_loss_stops_the_run_and_names_everything(micro: Experiment, tmp_path: Path) -> None:
    with pytest.raises(TrainingError) as caught:
        fedu2.train(_with(micro, "optimizer.lr=1e30", "rounds=3"), tmp_path / "run")
    sentence = str(caught.value)
    assert "round 1, client 0, step" in sentence
    assert "there is no checkpoint yet" in sentence


class _BrokenLater:
    """A backend that delivers NaN in round 2."""

    def __init__(self, inner: LocalBackend) -> None:
        self.inner = inner

    def run(self, tasks: Sequence[Task], server: ServerState, memories: Mapping, observer: Callback) -> Iterator[Reply]:
        for reply in self.inner.run(tasks, server, memories, observer):
            if reply.client == 1 and tasks[0].round == 2:
                reply.model.params[3] = float("nan")
            yield reply


def test_non_finite_weights_never_reach_the_global_model(micro: Experiment) -> None:
    method, backend, state, examples = _setting(micro)
    state, _ = play_round(state, method, _BrokenLater(backend), examples, Callback())
    with pytest.raises(TrainingError, match="the model of client 1 is not finite after round 2"):
        play_round(state, method, _BrokenLater(backend), examples, Callback())


def test_checkpoint_round_trip(micro: Experiment, tmp_path: Path) -> None:
    method, backend, state, examples = _setting(_with(micro, "method=fedbyol"))
    state, _ = play_round(state, method, backend, examples, Callback())
    model = backend.lanes[0].model
    layouts = model.layout.prefix(method.stays), model.buffer_layout.prefix(method.stays)
    checkpoints = Checkpoints(tmp_path / "checkpoint", *layouts)
    assert checkpoints.latest("cpu") is None
    checkpoints.save(state, {"seed": 0})
    loaded, experiment, _ = checkpoints.latest("cpu") or pytest.fail("nothing was written")
    assert experiment == {"seed": 0}
    assert torch.equal(loaded.server.model.params, state.server.model.params)
    assert torch.equal(loaded.server.model.buffers, state.server.model.buffers)
    assert loaded.memories.keys() == state.memories.keys() == {0, 1, 2}
    for client, memory in state.memories.items():
        assert all(torch.equal(loaded.memories[client][name], tensor) for name, tensor in memory.items())
    assert not list((tmp_path / "checkpoint").glob(".*"))


def test_bfloat16_runs_close_to_float32(micro: Experiment, tmp_path: Path, trained: Trained) -> None:
    exact = trained(micro, tmp_path / "a")
    rough = fedu2.train(_with(micro, "precision=bfloat16"), tmp_path / "b")
    assert rough.history[1]["loss"] == pytest.approx(exact.history[1]["loss"], rel=0.05)


def test_a_damaged_log_is_restored_from_the_checkpoint(
    micro: Experiment, tmp_path: Path, trained: Trained, caplog: pytest.LogCaptureFixture
) -> None:
    run = trained(micro, tmp_path / "run")
    log = run.path / "metrics.jsonl"
    whole = log.read_text()
    loss = str(run.history[1]["loss"])
    for damaged in (whole.replace(loss, loss.replace("1", "2", 1).replace("3", "4", 1)), whole[:-20], "", None):
        assert damaged != whole
        log.unlink() if damaged is None else log.write_text(damaged)
        caplog.clear()
        again = fedu2.train(micro, run.path, resume=True)
        assert log.read_text() == whole
        assert again.summary["rounds"] == 2
        torn = damaged is not None and whole.startswith(damaged)  # as a kill leaves it
        assert ("metrics.jsonl is damaged or missing; it is restored" in caplog.text) is not torn


def test_a_damaged_copy_of_the_log_is_restored_from_the_log(
    micro: Experiment, tmp_path: Path, trained: Trained
) -> None:
    run = trained(micro, tmp_path / "run")
    log, copy = run.path / "metrics.jsonl", run.path / "checkpoint" / "metrics.jsonl"
    whole = log.read_text()
    for rounds, damaged in enumerate((whole.replace("1", "2"), whole[:-20], "", None), start=3):
        copy.unlink() if damaged is None else copy.write_text(damaged)
        longer = fedu2.train(_with(micro, f"rounds={rounds}"), run.path, resume=True)
        assert log.read_text().startswith(whole)
        assert copy.read_text() == log.read_text()
        assert [record["round"] for record in longer.history] == list(range(rounds + 1))
    last = log.read_text().splitlines(keepends=True)[-1]
    for path in (log, copy):  # of the newest checkpoint's rounds no whole copy is left: its predecessor has one
        path.write_text(path.read_text().removesuffix(last))
    again = fedu2.train(_with(micro, f"rounds={rounds}"), run.path, resume=True)
    assert _without_clocks(again.history) == _without_clocks(longer.history)
    for path in (log, copy):
        path.write_text("")
    with pytest.raises(TrainingError, match=r"metrics.jsonl is damaged or missing, and so is .*metrics.jsonl"):
        fedu2.train(_with(micro, f"rounds={rounds}"), run.path, resume=True)
    assert copy.read_text() == ""


def test_a_damaged_log_without_a_copy_loses_only_its_damaged_lines(
    micro: Experiment, tmp_path: Path, trained: Trained
) -> None:
    run = trained(micro, tmp_path / "run")
    _without_records(run.path)
    log = run.path / "metrics.jsonl"
    lines = log.read_bytes().splitlines(keepends=True)
    log.write_bytes(lines[0][:20] + b"\xff\n" + b"5\n" + b"".join(lines[1:]))
    longer = fedu2.train(_with(micro, "rounds=3"), run.path, resume=True)
    assert [record["round"] for record in longer.history] == [1, 2, 3]  # a trained model is not passed off as untrained
    assert "untrained_knn" not in longer.summary
    assert "knn" in longer.summary
    _without_records(run.path)
    log.write_bytes(b"")
    emptied = fedu2.train(_with(micro, "rounds=3"), run.path, resume=True)
    assert emptied.summary["rounds"] == 0
    assert result_table("", emptied.summary, None, run.path).row_count > 0


def test_a_run_whose_checkpoint_is_gone_is_not_played_over(micro: Experiment, tmp_path: Path, trained: Trained) -> None:
    run = trained(micro, tmp_path / "run")
    before = (run.path / "metrics.jsonl").read_bytes()
    shutil.rmtree(run.path / "checkpoint")
    with pytest.raises(TrainingError, match="has played 2 rounds, but its checkpoint is gone"):
        fedu2.train(_with(micro, "rounds=3"), run.path, resume=True)
    assert (run.path / "metrics.jsonl").read_bytes() == before


def test_a_run_from_before_a_key_existed_is_resumed(micro: Experiment, tmp_path: Path) -> None:
    run = fedu2.train(_with(micro, "rounds=1"), tmp_path / "run")
    config = run.path / "config.yaml"
    config.write_text(unseal(config.read_text()).replace("rotation:\n  weight: 0.0\n", ""))
    place = run.path / "checkpoint" / "round-000001"
    begun = json.loads((place / "manifest.json").read_text())["experiment"]
    assert begun.pop("rotation.weight") == 0
    _rewrite_manifest(place, experiment=begun)
    assert "rotation" not in config.read_text()
    assert fedu2.train(_with(micro, "rounds=2"), run.path, resume=True).summary["rounds"] == 2


@pytest.mark.parametrize(("method", "factor"), [("fedu2", 0.5), ("fedbyol", 1.0)])
def test_a_run_from_before_a_key_moved_is_resumed(
    micro: Experiment, tmp_path: Path, method: str, factor: float
) -> None:
    """`eua.server_lr` is `server.lr` now; where EUA did not aggregate, it had no effect."""
    run = fedu2.train(_with(micro, f"method={method}", "rounds=1", f"server.lr={factor}"), tmp_path / "run")
    config = run.path / "config.yaml"
    text = re.sub(r"^server:\n(  .*\n)+", "", unseal(config.read_text()), flags=re.MULTILINE)
    config.write_text(seal(text.replace("eua:\n", "eua:\n  server_lr: 0.5\n")))
    place = run.path / "checkpoint" / "round-000001"
    begun = json.loads((place / "manifest.json").read_text())["experiment"]
    begun = {key: value for key, value in begun.items() if not key.startswith("server.")} | {"eua.server_lr": 0.5}
    _rewrite_manifest(place, experiment=begun)
    assert fedu2.Run(run.path).experiment.server.lr == factor
    assert fedu2.train(_with(run.experiment, "rounds=2"), run.path, resume=True).summary["rounds"] == 2


@pytest.mark.parametrize(("target", "reads"), [("shared", True), ("local", False)])
def test_the_former_format_is_read_where_clients_remember_nothing(
    micro: Experiment, tmp_path: Path, target: str, reads: bool
) -> None:
    run = fedu2.train(_with(micro, f"byol.target={target}", "rounds=1"), tmp_path / "run")
    _rewrite_manifest(run.path / "checkpoint" / "round-000001", format=1)
    longer = _with(micro, f"byol.target={target}", "rounds=2")
    if reads:
        assert fedu2.train(longer, run.path, resume=True).summary["rounds"] == 2
    else:
        with pytest.raises(TrainingError, match="format 1; this version reads 2"):
            fedu2.train(longer, run.path, resume=True)


def test_a_checkpoint_knows_its_own_experiment(micro: Experiment, tmp_path: Path, trained: Trained) -> None:
    run = trained(micro, tmp_path / "run")
    changed = _with(micro, "optimizer.lr=0.5", "rounds=3")
    (run.path / "config.yaml").write_text(resolve(changed).to_yaml())
    with pytest.raises(UsageError, match=r"another configuration: optimizer\.lr was 0\.05 and is now 0\.5"):
        fedu2.train(changed, run.path, resume=True)


@pytest.mark.parametrize("entry", [{"round": 9}, {"round": "2"}, {"files": []}, {"experiment": None}, {"format": 7}])
def test_manifests_are_not_trusted(micro: Experiment, tmp_path: Path, trained: Trained, entry: dict) -> None:
    experiment = _with(micro, "rounds=3")
    run = trained(experiment, tmp_path / "run")
    good = _weights(run.path)
    _rewrite_manifest(run.path / "checkpoint" / "round-000003", **entry)
    fedu2.train(experiment, run.path, resume=True)  # falls back to round 2
    assert _weights(run.path) == good


def test_fewer_rounds_than_played_are_refused(micro: Experiment, tmp_path: Path, trained: Trained) -> None:
    run = trained(micro, tmp_path / "run")
    with pytest.raises(UsageError, match="rounds=1 is fewer than"):
        fedu2.train(_with(micro, "rounds=1"), run.path, resume=True)


def test_drafts_of_a_crash_do_not_stand_in_the_way(micro: Experiment, tmp_path: Path) -> None:
    out = tmp_path / "run"
    (out / "checkpoint" / ".round-000001.77").mkdir(parents=True)
    for name in (".config.yaml.ab12", ".partition.json.cd34", ".images.blake2b.ef56"):
        (out / name).write_text("half")
    run = fedu2.train(micro, out)
    assert not [path for path in run.path.rglob(".*") if path.name != ".lock"]


def test_a_step_that_overflows_never_becomes_a_checkpoint(micro: Experiment, tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match="the global model is not finite after round 1"):
        fedu2.train(_with(micro, "server.lr=1e300"), tmp_path / "run")
    assert not list((tmp_path / "run" / "checkpoint").glob("round-*"))


def test_a_checkpoint_that_cannot_be_written_is_an_error_in_words(
    micro: Experiment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise SafetensorError("No space left on device")

    monkeypatch.setattr("fedu2.federation.checkpoint.save_file", full)
    with pytest.raises(TrainingError, match="round 1 cannot be written: No space left"):
        fedu2.train(micro, tmp_path / "run")


class _Killed(BaseException):
    """As good as SIGKILL: nobody catches it."""


@pytest.mark.parametrize(("every", "rounds"), [(1, 1), (3, 2)])
def test_a_run_that_ends_before_its_first_checkpoint_begins_anew(
    micro: Experiment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, every: int, rounds: int
) -> None:
    experiment = _with(micro, f"rounds={rounds}", f"checkpoint_every={every}")
    whole = fedu2.train(experiment, tmp_path / "whole")

    def killed(*_: object) -> None:
        raise _Killed

    with monkeypatch.context() as patch:
        patch.setattr(Checkpoints, "save", killed)
        with pytest.raises(_Killed):
            fedu2.train(experiment, tmp_path / "cut")
    resumed = fedu2.train(experiment, tmp_path / "cut", resume=True)
    assert _weights(resumed.path) == _weights(whole.path)
    assert _without_clocks(resumed.history) == _without_clocks(whole.history)


def test_a_damaged_manifest_is_noticed_whatever_it_says(micro: Experiment, tmp_path: Path, trained: Trained) -> None:
    experiment = _with(micro, "rounds=3", "evaluation.every=1")
    run = trained(experiment, tmp_path / "run")
    manifest = run.path / "checkpoint" / "round-000003" / "manifest.json"
    content = json.loads(manifest.read_text())
    for entry in ({"best": {"round": 3, "knn": 99.0}}, {"experiment": {**content["experiment"], "seed": 7}}):
        manifest.write_text(json.dumps({**content, **entry}))
        fedu2.train(experiment, run.path, resume=True)
        again = json.loads(manifest.read_text())
        assert (again["best"], again["experiment"]) == (content["best"], content["experiment"])


def test_a_damaged_configuration_is_taken_from_the_checkpoint(
    micro: Experiment, tmp_path: Path, trained: Trained, caplog: pytest.LogCaptureFixture
) -> None:
    run = trained(micro, tmp_path / "run")
    config = run.path / "config.yaml"
    whole = config.read_text()
    for damaged in (whole.replace("rounds: 2", "rounds: 9"), whole[: len(whole) // 2], "", None):
        assert damaged != whole
        config.unlink() if damaged is None else config.write_text(damaged)
        caplog.clear()
        fedu2.train(experiment_from([], None, run.path), run.path, resume=True)
        assert "config.yaml" in caplog.text
        assert config.read_text() == whole
    shutil.rmtree(run.path / "checkpoint")
    config.write_text(whole.replace("rounds: 2", "rounds: 9"))
    with pytest.raises(UsageError, match=r"config\.yaml is damaged, or was changed by hand"):
        experiment_from([], None, run.path)


def test_damaged_checkpoints_of_later_rounds_do_not_count_as_kept(
    micro: Experiment, tmp_path: Path, trained: Trained
) -> None:
    run = trained(_with(micro, "rounds=3"), tmp_path / "run")
    (run.path / "checkpoint" / "round-000003" / "manifest.json").write_text("")
    fedu2.train(_with(micro, "rounds=5", "checkpoint_every=5"), run.path, resume=True)
    held = {place.name for place in (run.path / "checkpoint").iterdir()}
    assert held == {"round-000002", "round-000005", "metrics.jsonl"}


@pytest.mark.parametrize("name", ["metrics.jsonl", "partition.json", "manifest.json"])
def test_a_full_disk_is_told_with_the_file_and_the_last_checkpoint(
    micro: Experiment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    flushed = os.fsync

    def full(descriptor: int) -> None:
        if name in os.readlink(f"/proc/self/fd/{descriptor}"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        flushed(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    if name == "manifest.json":
        with pytest.raises(TrainingError, match=r"No space left on device: .*; there is no checkpoint yet"):
            fedu2.train(micro, tmp_path / "run")
    else:
        with pytest.raises(OSError, match=f"No space left on device: .*{name}"):
            fedu2.train(micro, tmp_path / "run")
    assert not list((tmp_path / "run").rglob(".round-*"))


def test_tensorboard_that_cannot_write_does_not_stop_a_run(
    micro: Experiment, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "tensorboard").write_text("no directory")
    run = fedu2.train(micro, tmp_path / "run")
    assert run.finished
    assert "TensorBoard's curves end here" in caplog.text


def test_tensorboard_has_the_scalars_of_a_run_that_was_resumed(micro: Experiment, tmp_path: Path) -> None:
    fedu2.train(micro.with_(rounds=1), tmp_path / "run")
    run = fedu2.train(micro, tmp_path / "run", resume=True)
    curves = EventAccumulator(str(run.path / "tensorboard")).Reload()
    assert [event.step for event in curves.Scalars("loss")] == [1, 2]
    assert [event.value for event in curves.Scalars("knn")] == pytest.approx(
        [record["knn"] for record in run.history if "knn" in record]
    )


def test_tensorboard_tells_of_a_full_disk_in_one_line(
    micro: Experiment, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    curves, threads = TensorBoard(), threading.active_count()
    curves.on_start(micro, tmp_path, 0)
    with Path("/dev/full").open("wb", buffering=0) as full:
        curves._file = full
        for round_ in (1, 2):
            curves.on_round({"round": round_, "loss": 0.5})
    curves.close()
    assert caplog.text.count("TensorBoard's curves end here: [Errno 28] No space left on device") == 1
    assert threading.active_count() == threads  # of which one would tell of it by a traceback
