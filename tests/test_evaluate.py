"""`fedu2 evaluate`: runs, untrained encoders, the user's own labelled images, and what can be wrong with them."""

from __future__ import annotations

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

import fedu2
import fedu2.evaluate as evaluate_module
from fedu2.cli import main
from fedu2.errors import DataError, TrainingError, UsageError
from fedu2.evaluate import assess, evaluate, parse_protocols
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


def test_a_folder_called_like_the_data_set_is_another_measurement(
    run: fedu2.Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _folder(tmp_path / "sample", classes=3)
    monkeypatch.chdir(tmp_path)
    own = evaluate(run, ["knn"])["knn"]
    evaluate(run, ["knn"], data="sample")
    entries = {entry["data"]: entry["mean"] for entry in _entries(run)}
    assert entries["sample"] == own.mean
    assert set(entries) == {"sample", str(tmp_path / "sample")}


def test_a_run_that_goes_on_meanwhile(run: fedu2.Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """The round that is told is that of the encoder that was judged, though a newer one has appeared since."""
    load = evaluate_module.load_dataset

    def slow_load(*arguments: Any) -> Any:
        fedu2.train(run.experiment.with_(rounds=2), run.path, resume=True)
        return load(*arguments)

    monkeypatch.setattr(evaluate_module, "load_dataset", slow_load)
    assert assess(run, ["knn"]).round == 1
    assert _entries(run)[0]["round"] == 1
    assert run.rounds_played == 2


def test_two_evaluations_at_once_keep_both(run: fedu2.Run) -> None:
    with ThreadPoolExecutor(6) as pool:
        list(pool.map(lambda k: evaluate(run, ["knn"], parse_protocols([f"knn.k={k}"])), range(1, 7)))
    assert sorted(entry["options"]["knn"]["k"] for entry in _entries(run)) == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("text", ["[1]", "", '[{"protocol": "knn"}]', '[{"protocol": "knn", '])
def test_a_damaged_file_is_told_before_anything_is_computed(run: fedu2.Run, text: str) -> None:
    (run.path / "evaluation.json").write_text(text)
    with pytest.raises(DataError, match=r"evaluation\.json is damaged"):
        evaluate(run, ["knn"])
    assert (run.path / "evaluation.json").read_text() == text


def test_images_that_changed_are_not_the_runs(tmp_path: Path) -> None:
    folder = _folder(tmp_path / "mine", classes=2, images=20)
    values = {"dataset": "folder", "data.root": str(folder), "data.layout": "images", "data.image_size": 16,
              "clients": 2, "partition": "iid", "encoder": "tiny", "width": 4, "rounds": 1, "local_steps": 1,
              "batch_size": 8}  # fmt: skip
    run = fedu2.train(Experiment.parse(values), tmp_path / "run")
    assert evaluate(run, ["knn"])
    _folder(folder / "more", classes=1, images=5)
    with pytest.raises(UsageError, match="are not those that the run"):
        evaluate(run, ["knn"])


def test_an_encoder_that_is_broken_has_no_score(run: fedu2.Run, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = fedu2.Run.model

    def with_nan(self: fedu2.Run, *arguments: Any, **more: Any) -> Any:
        learner, round_ = broken(self, *arguments, **more)
        next(learner.encoder.parameters()).data.fill_(float("nan"))
        return learner, round_

    monkeypatch.setattr(fedu2.Run, "model", with_nan)
    with pytest.raises(TrainingError, match="not finite"):
        evaluate(run, ["knn"])
    assert not (run.path / "evaluation.json").exists()


def test_seeds_of_the_supervised_reference_have_their_own_networks(
    run: fedu2.Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    monkeypatch.setattr(
        "fedu2.evaluation.judge.finetune", lambda encoder, *_: seen.append(next(encoder.parameters()).clone()) or 0.0
    )
    evaluate(run, ["supervised"], parse_protocols(QUICK), seeds=2)
    assert not torch.equal(seen[0], seen[1])


def test_held_out_images_of_a_folder(run: fedu2.Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = _folder(tmp_path / "mine", classes=2, images=20)
    verdict = assess(run, ["knn"], data=folder, holdout=0.5)
    assert (verdict.trained_on, verdict.tested_on) == (20, 20)
    with pytest.raises(DataError, match="no images are held out"):
        assess(run, ["knn"], data=_folder(tmp_path / "few", classes=2, images=1))
    assert main(["evaluate", str(run.path), "--data", str(folder), "--protocol", "knn"]) == 0
    assert "(36 images, 4 to test)" in capsys.readouterr().out


def test_a_run_that_is_begun_anew_forgets_what_was_measured(run: fedu2.Run, tmp_path: Path) -> None:
    evaluate(run, ["knn"], untrained=True)
    (run.path / "metrics.jsonl").write_text('{"round": 0}\n')  # killed before its first round
    shutil.rmtree(run.path / "checkpoint")
    fedu2.train(run.experiment.with_(seed=5), run.path)
    assert not (run.path / "evaluation.json").exists()


def test_a_root_is_found_from_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _folder(tmp_path / "mine", classes=2, images=20)
    monkeypatch.chdir(tmp_path)
    settings = ["dataset=folder", "data.root=mine", "data.layout=images", "data.image_size=16", "clients=2",
                "partition=iid", "encoder=tiny", "width=4", "rounds=1", "local_steps=1", "batch_size=8"]  # fmt: skip
    run = fedu2.train(Experiment.parse({}, settings), "run")
    monkeypatch.chdir("/")
    assert evaluate(fedu2.Run(str(tmp_path / run.path)), ["knn"])
