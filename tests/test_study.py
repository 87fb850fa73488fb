"""Studies: variants of one experiment, chosen by validation images."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from tools import study

from fedu2.errors import UsageError

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


def test_a_study_trains_and_judges_its_variants_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
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
    assert capsys.readouterr().out.count("== ") == 2
    study.main([*map(str, places), "--commit", "0123", "evaluation.every=1"])
    assert json.loads(places[2].read_text()) == first
    assert "== " not in capsys.readouterr().out  # nothing was trained again


def test_a_study_does_not_see_test_images(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"plain would be chosen by test images: set data\.validation"):
        study.main([*map(str, _study(tmp_path, {**PLAN, "common": {**COMMON, "data.validation": 0}}))])
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("setting", ["optimizer.lr=1", "seed=1"])
def test_settings_that_change_results_belong_into_the_study(tmp_path: Path, setting: str) -> None:
    with pytest.raises(UsageError, match="belongs into the study"):
        study.main([*map(str, _study(tmp_path, PLAN)), setting])
