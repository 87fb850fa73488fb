"""Studies: variants of one experiment, chosen by validation images."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from tools import study

from fedu2.errors import UsageError
from fedu2.experiment import Experiment
from fedu2.methods import resolve
from fedu2.resuming import FREE_KEYS
from fedu2.run import Run

COMMON = {
    "dataset": "sample", "data.validation": 0.2, "data.image_size": 16, "clients": 3, "encoder": "tiny", "width": 4,
    "rounds": 2, "local_steps": 2, "batch_size": 32,
}  # fmt: skip
PLAN = {
    "common": COMMON,
    "variants": {"plain": {"method": "fedbyol"}, "falling": {"method": "fedu2", "fur.schedule": "cosine"}},
    "protocols": ["knn", "linear"],
}


def _study(folder: Path, plan: dict) -> tuple[Path, Path, Path]:
    (folder / "study.yaml").write_text(yaml.safe_dump(plan, sort_keys=False))
    return folder / "study.yaml", folder / "runs", folder / "record.json"


def test_a_study_trains_and_judges_its_variants_once(tmp_path: Path) -> None:
    places = _study(tmp_path, PLAN)
    study.main([*map(str, places), "--commit", "0123", "evaluation.every=1"])
    first = json.loads(places[2].read_text())
    assert [each["name"] for each in first] == ["plain", "falling"]
    for each in first:
        assert each["commit"] == "0123"
        assert set(each["scores"]) == {"knn", "linear"}
        assert each["scores"]["knn"] == pytest.approx(each["history"][-1]["knn"], abs=1e-3)
        assert [round_["round"] for round_ in each["history"]] == [0, 1, 2]
        assert "data.root" not in each["config"]
    assert [each["config"]["fur.schedule"] for each in first] == ["constant", "cosine"]
    made = _files(places[1])
    study.main([*map(str, places), "--commit", "0123", "evaluation.every=1"])
    assert json.loads(places[2].read_text()) == first
    assert _files(places[1]) == made  # nothing was trained or judged again


def test_a_run_that_is_cut_off_is_kept_as_far_as_it_went(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    places = _study(tmp_path, {**PLAN, "protocols": ["knn"]})
    arguments = [*map(str, places), "evaluation.every=1"]

    def cut_off(run: Run, *_: object, **__: object) -> None:
        if run.path.name == "falling":
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(study, "assess", cut_off)
        with pytest.raises(KeyboardInterrupt):
            study.main(arguments)
    plain, falling = json.loads(places[2].read_text())
    assert (plain["name"], falling["name"]) == ("plain", "falling")
    assert falling["scores"] == {}
    assert [round_["round"] for round_ in falling["history"]] == [0, 1, 2]
    study.main(arguments)
    ended = json.loads(places[2].read_text())[1]
    assert set(ended.pop("scores")) == {"knn"}
    assert ended == {key: value for key, value in falling.items() if key != "scores"}


def test_a_run_of_another_experiment_is_not_taken(tmp_path: Path) -> None:
    plan = {**PLAN, "variants": {"plain": {"method": "fedbyol"}}, "protocols": ["knn"]}
    study.main([*map(str, _study(tmp_path, plan))])
    plan["variants"] = {"plain": {"method": "fedbyol", "batch_size": 16}}
    with pytest.raises(UsageError, match="has another configuration: batch_size was 32 and is now 16"):
        study.main([*map(str, _study(tmp_path, plan))])


def _files(runs: Path) -> dict[Path, bytes]:
    """Metrics and scores; checkpoints by their manifests."""
    names = ("metrics.jsonl", "evaluation.json", "manifest.json")
    return {path: path.read_bytes() for name in names for path in runs.rglob(name)}


def test_a_study_does_not_see_test_images(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"plain would be chosen by test images: set data\.validation"):
        study.main([*map(str, _study(tmp_path, {**PLAN, "common": {**COMMON, "data.validation": 0}}))])
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("setting", ["optimizer.lr=1", "seed=1", "precision=bfloat16", "evaluation.k=1"])
def test_settings_that_change_results_belong_in_the_study(tmp_path: Path, setting: str) -> None:
    with pytest.raises(UsageError, match="belongs in the study"):
        study.main([*map(str, _study(tmp_path, PLAN)), setting])


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"protocols": ["knnn"]}, "unknown protocol 'knnn'"),
        ({"protocols": "knn"}, "a list such as"),
        ({"protocols": None}, "a list such as"),
        ({"variants": {"plain": None}}, "a study has common"),
        ({"variants": None}, "a study has common"),
        ({"common": None}, "a study has common"),
    ],
)
def test_a_bad_study_is_told_before_anything_is_trained(tmp_path: Path, change: dict, told: str) -> None:
    with pytest.raises(UsageError, match=told):
        study.main([*map(str, _study(tmp_path, {**PLAN, **change}))])
    assert not (tmp_path / "runs").exists()


SCREENING = Path(__file__).parents[1] / "results" / "recipe-screening"
PATCHED = {  # with keys that were not kept
    "small-eua-level", "small-eua-shares-fur", "small-fixed-references", "small-forms-seeds", "small-moving-references",
    "small-others", "small-past-rivals", "small-squared-seeds", "small-squared-shares", "small-step-forms",
    "small-warm-up", "squared-shares",
}  # fmt: skip
STUDIES = [path for path in sorted(SCREENING.glob("*.yaml")) if path.with_suffix(".json").exists()]


@pytest.mark.parametrize("path", [path for path in STUDIES if path.stem not in PATCHED], ids=lambda path: path.stem)
def test_study_files_still_mean_what_their_records_say(path: Path) -> None:
    planned = study.variants(yaml.safe_load(path.read_text()), [])
    played = json.loads(path.with_suffix(".json").read_text())
    assert played
    for record in played:
        ours, theirs = resolve(planned[record["name"]]).flat(), resolve(Experiment.parse(record["config"])).flat()
        fixed = [key for key in ours if not key.startswith((*FREE_KEYS, "precision"))]
        assert {key: theirs[key] for key in fixed} == {key: ours[key] for key in fixed}, record["name"]


@pytest.mark.parametrize("path", [path for path in STUDIES if path.stem in PATCHED], ids=lambda path: path.stem)
def test_what_a_study_sets_stands_in_records_of_other_sources(path: Path) -> None:
    plan = yaml.safe_load(path.read_text())
    for record in json.loads(path.with_suffix(".json").read_text()):
        asked = {**plan["common"], **plan["variants"][record["name"]]}
        assert {key: record["config"].get(key) for key in asked} == asked, record["name"]
