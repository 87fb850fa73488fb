"""The command line as a user meets it: results, exit codes, one clear sentence on failure."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image

from fedu2.cli import main
from fedu2.data import datasets as known_datasets
from fedu2.data import load_dataset
from fedu2.experiment import Experiment
from fedu2.methods import resolve, title_of
from fedu2.rundir import RunDirectory

SMALL = [
    "data.image_size=16",
    "clients=3",
    "partition=iid",
    "width=4",
    "rounds=1",
    "local_steps=2",
    "batch_size=16",
    "evaluation.every=0",
]


def _fails(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    """Exit code and the sentence of a command that must fail without a traceback."""
    code = main(list(arguments))
    err = capsys.readouterr().err
    assert code != 0
    assert "Traceback" not in err
    sentence = err.strip().splitlines()[-1]
    assert sentence.startswith("fedu2: ")
    return code, sentence


def _images(folder: Path, count: int, size: tuple[int, int] = (20, 24)) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for i in range(count):
        Image.effect_noise(size, 40 + i).convert("RGB").save(folder / f"{i}.png")


def test_train_ends_with_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"
    assert main(["train", "--out", str(out), "--compare", *SMALL]) == 0
    text = capsys.readouterr().out
    for phrase in (
        "kNN, untrained encoder",
        "kNN, FedAvg at equal cost",
        "kNN, trained encoder",
        "effective rank",
        "matched FUR mass",
        "What to type next",
        "--resume",
    ):
        assert phrase in text
    assert {p.name for p in out.iterdir()} >= {
        "config.yaml",
        "partition.json",
        "metrics.jsonl",
        "summary.json",
        "checkpoint",
        "tensorboard",
    }
    plain = Experiment.load(out / "fedavg" / "config.yaml")
    ours = Experiment.load(out / "config.yaml")
    assert (plain.aggregator, plain.fur.weight) == ("fedavg", 0.0)
    assert ours.with_(aggregator="fedavg", fur__weight=0.0) == plain


def test_the_written_config_replays_the_run(tmp_path: Path) -> None:
    assert main(["train", "--out", str(tmp_path / "a"), *SMALL]) == 0
    assert main(["train", "--config", str(tmp_path / "a" / "config.yaml"), "--out", str(tmp_path / "b")]) == 0
    first, second = (json.loads((tmp_path / run / "summary.json").read_text()) for run in "ab")
    assert first["knn"] == second["knn"]
    assert first["loss"] == second["loss"]


def test_resume_finds_the_newest_run_and_its_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["train", *SMALL]) == 0
    assert main(["train", "--resume", "rounds=2"]) == 0
    assert "resuming after round 1" in capsys.readouterr().out
    (run,) = (tmp_path / "runs").iterdir()
    assert json.loads((run / "summary.json").read_text())["rounds"] == 2


@pytest.mark.parametrize(
    ("arguments", "code", "sentence"),
    [
        (["alpah=1"], 2, "unknown key 'alpah'; did you mean 'alpha'?"),
        (["method=fedbyoll"], 2, "did you mean 'fedbyol'?"),
        (["alpha=0"], 2, "alpha=0 is not allowed"),
        (["dataset=cifar11"], 2, "unknown dataset 'cifar11'"),
        (["encoder=resnet19"], 2, "did you mean 'resnet1"),
        (["device=quantum"], 2, "device=quantum cannot be used"),
        (["clients=5000"], 1, "4000 images cannot be dealt to 5000 clients"),
        (["clients=1000"], 1, "min_size"),
        (["partition=file", "split.file=nowhere.json"], 1, "nowhere.json"),
        (["--config", "nowhere.yaml"], 2, "cannot read the configuration"),
        (["--resume", "--out", "nowhere/run"], 2, "nowhere/run holds no run to resume"),
        (["--flag"], 2, "--flag"),
        (["dataset=cifar10", "data.root=nowhere", "data.download=false"], 1, "cifar-10-binary.tar.gz"),
        (["dataset=cifar100", "data.root=.", "data.download=false"], 1, "cifar-100-binary.tar.gz"),
        (["fur=3"], 2, "fur is a group of keys: set fur.weight"),
        (["views.crop_scale=[0.9,0.1]"], 2, "crop_scale"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_bad_input_is_one_sentence(
    arguments: list[str],
    code: int,
    sentence: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FEDU2_CACHE", str(tmp_path / "cache"))
    got, said = _fails(capsys, "train", *arguments)
    assert got == code
    assert sentence in said
    assert not list(tmp_path.iterdir()), "a request that fails at once leaves nothing behind"


def test_debug_shows_the_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "alpah=1", "--debug"]) == 2
    assert "Traceback" in capsys.readouterr().err


def test_a_folder_of_clients(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEDU2_CACHE", str(tmp_path / "cache"))
    for name, count in (("north", 12), ("south", 9)):
        _images(tmp_path / "sites" / name, count)
    (tmp_path / "sites" / "south" / "broken.png").write_bytes(b"not an image")
    settings = ["dataset=folder", f"data.root={tmp_path / 'sites'}", "encoder=tiny", *SMALL]
    assert main(["train", "--out", str(tmp_path / "run"), *settings]) == 0
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["experiment"]["clients"] == 2
    assert "knn" not in summary  # nobody labelled anything
    assert any("broken.png" in line for line in summary["skipped_images"])
    assert "effective rank" in capsys.readouterr().out


def test_an_empty_client_folder_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEDU2_CACHE", str(tmp_path / "cache"))
    _images(tmp_path / "sites" / "north", 5)
    (tmp_path / "sites" / "empty").mkdir()
    code, said = _fails(capsys, "train", "dataset=folder", f"data.root={tmp_path / 'sites'}", *SMALL)
    assert code == 1
    assert "empty" in said


def test_a_nan_loss_names_round_client_and_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "run"
    assert main(["train", "--out", str(out), *SMALL]) == 0
    place = out / "checkpoint" / "round-000001"
    before = (place / "server.safetensors").read_bytes()
    monkeypatch.setattr("fedu2.federation.rounds.learning_rate", lambda experiment, round_: 1e30)
    code, said = _fails(capsys, "train", "--resume", "--out", str(out), "rounds=2")
    assert code == 1
    assert "in round 2, client 0, step 2" in said
    assert f"the last good checkpoint is {place}" in said
    assert (place / "server.safetensors").read_bytes() == before


def test_lists(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert main(["methods"]) == 0
    methods = capsys.readouterr().out
    assert all(name in methods for name in ("fedbyol", "fedsimclr", "fedsimsiam", "fedu2"))
    monkeypatch.setitem(known_datasets._parts, "undocumented", lambda options: load_dataset("sample", options))
    assert main(["datasets"]) == 0
    datasets = capsys.readouterr().out
    assert all(name in datasets for name in ("sample", "cifar10", "cifar100", "folder"))
    assert main(["train", "--keys"]) == 0
    assert "fur.weight" in capsys.readouterr().out
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("fedu2 ")


def test_import_is_quick_and_does_not_load_torch() -> None:
    code = "import sys, fedu2, fedu2.cli; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], env=dict(os.environ)).returncode == 0


def test_the_readme_example_script_runs(tmp_path: Path) -> None:
    script = Path(__file__).parents[1] / "examples" / "train_and_use.py"
    arguments = [sys.executable, str(script), str(tmp_path / "run"), *SMALL]
    done = subprocess.run(arguments, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "nearest" in done.stdout


def test_device_auto_is_the_cpu_without_cuda() -> None:
    from fedu2.engine import choose_device

    expected = "cuda" if torch.cuda.is_available() else "cpu"
    assert choose_device("auto").type == expected


def test_an_interrupted_comparison_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = str(tmp_path / "run")
    assert main(["train", "--out", out, *SMALL]) == 0
    assert main(["train", "--resume", "--compare", "--out", out]) == 0
    assert "kNN, FedAvg at equal cost" in capsys.readouterr().out
    assert main(["train", "--resume", "--compare", "--out", out]) == 0


def test_images_that_changed_are_refused_on_resume(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEDU2_CACHE", str(tmp_path / "cache"))
    for name in ("north", "south"):
        _images(tmp_path / "sites" / name, 10)
    out = ["--out", str(tmp_path / "run")]
    open_ended = "optimizer.schedule=constant"
    settings = ["dataset=folder", f"data.root={tmp_path / 'sites'}", "encoder=tiny", open_ended, *SMALL]
    assert main(["train", *out, *settings]) == 0
    _images(tmp_path / "sites" / "south", 12, size=(30, 30))
    code, said = _fails(capsys, "train", "--resume", *out, "rounds=2")
    assert code == 2
    assert "are not those that the run" in said


def test_without_a_command_the_help_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    assert "train" in capsys.readouterr().out
    code, said = _fails(capsys, "trian")
    assert code == 2
    assert said.count("Did you mean") == 1


@pytest.mark.parametrize(
    ("settings", "code"),
    [
        (["local_steps=0"], 2),
        (["optimizer.betas=[1,2]"], 2),
        (["optimizer.lr=1e300"], 2),
        (["device=meta"], 2),
        (["seed=2024-13-45"], 2),
        (["fur={1: 2}"], 2),
        (["dataset=folder", "data.root=~nobody-like-that"], 1),
        (["heads.hidden=10000000000000"], 1),
    ],
)
def test_absurd_values_are_one_sentence(
    settings: list[str], code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    got, _ = _fails(capsys, "train", "--out", str(tmp_path / "run"), *SMALL, *settings)
    assert got == code


def test_paths_are_taken_as_they_stand(tmp_path: Path) -> None:
    for text in ("/x/y #1", "2024", "yes", "a: b", "[x]", "1e5", "*star"):
        assert Experiment.parse({}, [f"data.root={text}"]).data.root == text
    assert Experiment.parse({}, ["data.root=null"]).data.root is None


def test_odd_names_of_run_directories(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("m[/b]", "with space", "ünï"):
        assert main(["train", "--out", str(tmp_path / name), *SMALL]) == 0
        assert (tmp_path / name / "summary.json").exists()


def test_a_terminal_without_unicode(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "fedu2.cli", "train", "--out", str(tmp_path / "run"), *SMALL]
    done = subprocess.run(command, env={**os.environ, "PYTHONIOENCODING": "ascii"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("load", "policy"), [(100.0, "PASSIVE"), (0.0, None)])
def test_threads_sleep_only_where_cores_are_busy(
    load: float, policy: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_WAIT_POLICY", "")
    monkeypatch.delenv("OMP_WAIT_POLICY")
    monkeypatch.setattr(os, "getloadavg", lambda: (load, load, load))
    assert main(["--version"]) == 0
    assert os.environ.get("OMP_WAIT_POLICY") == policy


def test_a_report_at_the_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "a run"
    assert main(["train", "--report", "--out", str(run), *SMALL]) == 0
    shown = capsys.readouterr().out
    assert (run / "report.html").resolve().as_uri() in shown
    assert "FedU²-BYOL" in (run / "report.html").read_text()
    assert f"fedu2 report '{run}'" not in shown  # it is there already
    assert f"fedu2 export '{run}'" in shown


def test_a_round_that_is_no_number_is_a_damaged_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"round": 0, "knn": 1.0}\n{"round": Infinity}\n{"round": NaN}\n')
    assert [record["round"] for record in RunDirectory(tmp_path).history()] == [0]
    assert caplog.text.count("is damaged and left out") == 2


def test_a_config_changed_by_hand_is_told_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    assert main(["train", "--out", str(run), *SMALL]) == 0
    config = run / "config.yaml"
    config.write_text(config.read_text().replace("rounds: 1", "rounds: 9"))
    capsys.readouterr()
    assert main(["train", "--resume", "--out", str(run)]) == 0
    assert capsys.readouterr().err.count("was changed by hand") == 1


@pytest.mark.parametrize(
    ("settings", "title"),
    [
        (["method=fedu2"], "FedU²-BYOL"),
        (["method=fedu2", "objective=simclr"], "FedU²-SimCLR"),
        (["method=fedu2", "fur.weight=0", "aggregator=fedavg"], "FedAvg-BYOL"),
        (["method=fedu2", "fur.weight=0"], "FedU²-BYOL without FUR"),
        (["method=fedu2", "objective=simsiam", "aggregator=fedavg"], "FedU²-SimSiam without EUA"),
        (["method=fedbyol"], "FedBYOL"),
        (["method=orchestra"], "Orchestra"),
    ],
)
def test_titles_of_experiments(settings: list[str], title: str) -> None:
    assert title_of(resolve(Experiment.parse({}, settings))) == title
