"""`fedu2 evaluate`: runs, untrained encoders, the user's own labelled images, and what can be wrong with them."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from PIL import Image

import fedu2
from fedu2.cli import main
from fedu2.errors import DataError, UsageError
from fedu2.evaluate import evaluate, parse_protocols
from fedu2.experiment import Experiment
from fedu2.federation.rounds import initial_state
from fedu2.methods import build, resolve

QUICK = ["linear.epochs=2", "finetune.epochs=1", "finetune.fractions=[0.05]", "knn.k=20"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> fedu2.Run:
    values = {
        "data.image_size": 16, "clients": 2, "partition": "iid", "encoder": "tiny", "width": 4, "rounds": 1,
        "local_steps": 2, "batch_size": 32, "evaluation.every": 1,
    }  # fmt: skip
    return fedu2.train(Experiment.parse(values), tmp_path_factory.mktemp("runs") / "run")


@pytest.fixture
def run(finished: fedu2.Run, tmp_path: Path) -> fedu2.Run:
    shutil.copytree(finished.path, tmp_path / "run")
    return fedu2.Run(tmp_path / "run")


def _entries(run: fedu2.Run) -> list[dict]:
    return json.loads((run.path / "evaluation.json").read_text())


def test_all_protocols_are_judged_and_kept(run: fedu2.Run) -> None:
    scores = evaluate(run, options=parse_protocols(QUICK), seeds=2)
    assert list(scores) == ["knn", "linear", "finetune 5 %", "supervised 5 %"]
    assert [len(score.values) for score in scores.values()] == [1, 2, 2, 2]
    assert all(0 <= value <= 100 for score in scores.values() for value in score.values)
    entries = _entries(run)
    assert [entry["protocol"] for entry in entries] == list(scores)
    assert {(entry["encoder"], entry["round"], entry["data"]) for entry in entries} == {("last", 1, "sample")}
    assert entries[1]["mean"] == pytest.approx(sum(entries[1]["values"]) / 2)
    assert entries[1]["options"]["linear"]["epochs"] == 2


def test_knn_is_that_of_training(run: fedu2.Run) -> None:
    scores = evaluate(run, ["knn"])
    assert scores["knn"].mean == pytest.approx(run.history[-1]["knn"], abs=1e-4)
    before = evaluate(run, ["knn"], untrained=True)
    assert before["knn"].mean == pytest.approx(run.history[0]["knn"], abs=1e-4)
    assert [(entry["encoder"], entry["round"]) for entry in _entries(run)] == [("last", 1), ("untrained", 0)]


def test_the_best_round_is_kept(micro: Experiment, tmp_path: Path) -> None:
    """Its model survives later rounds and a resume."""
    run = fedu2.train(Experiment.parse(micro.flat(), ["rounds=4", "evaluation.every=1"]), tmp_path / "run")
    judged = {record["round"]: record["knn"] for record in run.history if record["round"] > 0}
    best = max(judged, key=lambda round_: (judged[round_], -round_))
    assert run.best_round == best
    scores = evaluate(run, ["knn"], best=True)
    assert scores["knn"].mean == pytest.approx(judged[best], abs=1e-4)
    assert [(entry["encoder"], entry["round"]) for entry in _entries(run)] == [("best", best)]
    part = fedu2.train(Experiment.parse(micro.flat(), ["rounds=3", "evaluation.every=1"]), tmp_path / "part")
    longer = fedu2.train(Experiment.parse(micro.flat(), ["rounds=4", "evaluation.every=1"]), part.path, resume=True)
    assert longer.best_round == best
    mine, its = longer.learner(best=True).state_dict(), run.learner(best=True).state_dict()
    assert all(torch.equal(mine[name], its[name]) for name in mine)
    with pytest.raises(UsageError, match="not both"):
        evaluate(run, ["knn"], best=True, untrained=True)


def test_a_run_that_was_never_judged_has_no_best_round(micro: Experiment) -> None:
    state = initial_state(build(resolve(micro)), "cpu")
    assert state.best is None
    first = replace(state, round=1).judged(30.0)
    assert first.best is not None
    assert replace(first, round=2).judged(30.0).best.round == 1  # the first of equals
    assert replace(first, round=2).judged(31.0).best.round == 2


def test_the_same_measurement_takes_the_place_of_the_old_one(run: fedu2.Run) -> None:
    for epochs in (1, 1, 2):
        evaluate(run, ["linear"], parse_protocols([f"linear.epochs={epochs}"]), seeds=1)
    assert [entry["options"]["linear"]["epochs"] for entry in _entries(run)] == [1, 2]


def _folder(root: Path, classes: int, images: int = 12) -> Path:
    noise = torch.Generator().manual_seed(0)
    for label in range(classes):
        (root / f"class{label}").mkdir(parents=True)
        for number in range(images):
            pixels = torch.randint(0, 60, (20, 24, 3), generator=noise, dtype=torch.uint8) + 60 * label
            Image.fromarray(pixels.numpy()).save(root / f"class{label}" / f"{number}.png")
    return root


def test_the_users_own_labelled_images(run: fedu2.Run, tmp_path: Path) -> None:
    folder = _folder(tmp_path / "mine", classes=3)
    scores = evaluate(run, ["knn", "linear"], parse_protocols(["knn.k=5", "linear.epochs=80"]), seeds=1, data=folder)
    assert scores["linear"].mean > 60  # dark, medium and light
    assert {entry["data"] for entry in _entries(run)} == {str(folder)}


def test_images_of_one_class_are_refused(run: fedu2.Run, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="all training images are of one class"):
        evaluate(run, ["knn"], data=_folder(tmp_path / "mine", classes=1))
    assert not (run.path / "evaluation.json").exists()


def test_images_without_classes_are_refused(run: fedu2.Run, tmp_path: Path) -> None:
    folder = _folder(tmp_path / "mine", classes=1) / "class0"
    with pytest.raises(DataError, match="no labels"):
        evaluate(run, ["knn"], data=folder)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            ["--protocol", "lineer"],
            "unknown protocol 'lineer': known are finetune, knn, linear",
        ),
        (["linear.epoch=3"], "did you mean 'linear.epochs'"),
        (["linear.epochs=0"], "linear.epochs"),
        (["finetune.fractions=[0.1, 2]"], "finetune.fractions"),
    ],
)
def test_bad_input_is_one_sentence(
    run: fedu2.Run, capsys: pytest.CaptureFixture[str], arguments: list[str], sentence: str
) -> None:
    assert main(["evaluate", str(run.path), *arguments]) == 2
    assert sentence in capsys.readouterr().err


def test_runs_that_cannot_be_judged(run: fedu2.Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["evaluate", str(tmp_path / "nothing")]) == 2
    assert "holds no run" in capsys.readouterr().err
    shutil.rmtree(run.path / "checkpoint")
    assert main(["evaluate", str(run.path), "--protocol", "knn"]) == 1
    assert "has no checkpoint yet" in capsys.readouterr().err
    assert main(["evaluate", str(run.path), "--protocol", "knn", "--untrained"]) == 0


def test_the_command_shows_a_table(run: fedu2.Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["evaluate", str(run.path), "--protocol", "knn", "--protocol", "linear", "--seeds", "2", *QUICK]) == 0
    shown = capsys.readouterr().out
    assert "encoder after round 1 on sample" in shown
    assert " ± " in shown
    assert "evaluation.json" in shown


def test_protocols_are_parsed_like_experiments() -> None:
    assert parse_protocols(["finetune.fractions=[0.5]"]).finetune.fractions == (0.5,)
    with pytest.raises(UsageError, match="unknown key"):
        parse_protocols(["fur.weight=0"])
