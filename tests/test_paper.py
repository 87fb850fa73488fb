"""The paper as experiments: cells, records, slices of time, tables."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from tools import pictures

from fedu2.cli import main
from fedu2.errors import DataError, TrainingError, UsageError
from fedu2.evaluate import assess, evaluate, kept, parse_protocols
from fedu2.experiment import Experiment
from fedu2.federation.callbacks import Callback
from fedu2.federation.deadline import Deadline
from fedu2.files import digest_of
from fedu2.paper import cli, page, plan, rows
from fedu2.paper.campaign import Campaign, choose_cells
from fedu2.paper.command import parse_seeds
from fedu2.paper.plan import Cell, Exhibit, Series, exhibits, published
from fedu2.paper.records import Record, commit, path_of, read, records_of, write
from fedu2.paper.tables import markdown, measured, sheets

QUICK = {"data.image_size": 16, "clients": 2, "width": 4, "local_steps": 2, "rounds": 2, "evaluation.every": 0}


def _cell(row: str, **settings: Any) -> Cell:
    return Cell("micro", row, row.upper(), {"dataset": "sample", **QUICK, "method": "fedu2", **settings})


CELLS = (_cell("one"), _cell("two", **{"fur.weight": 0}))


@pytest.fixture
def micro_table(monkeypatch: pytest.MonkeyPatch) -> Exhibit:
    """A small table beside the paper's own, with a published figure for one of its two rows."""
    exhibit = Exhibit("Micro", ("knn", "linear"), CELLS)
    monkeypatch.setitem(exhibits._parts, "micro", exhibit)
    monkeypatch.setitem(published(), "micro", {"micro": {"one": [10.0, 20.0]}})  # type: ignore[arg-type]
    return exhibit


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Both cells, trained and judged by kNN, under runs/ and results/."""
    place = tmp_path_factory.mktemp("campaign")
    campaign = Campaign(place / "runs", place / "results", protocols=("knn",), commit="abc")
    assert [campaign.complete(record) for record in campaign.play(CELLS, [0], Deadline(None), lambda *_: [])] == [
        True,
        True,
    ]
    return place


@pytest.fixture
def place(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "place"))


# The plan


def test_tables_have_the_papers_shape() -> None:
    first, second = exhibits["table1"], exhibits["table2"]
    assert [len(figures) for figures in published()["table1"].values()] == [12] * 4
    assert [len(figures) for figures in published()["table2"].values()] == [10] * 6
    for name, exhibit in (("table1", first), ("table2", second)):
        for setting, figures in published()[name].items():
            assert all(len(values) == len(exhibit.protocols) for values in figures.values())
            assert {c.row for c in exhibit.cells if c.setting == setting} >= set(figures)
    assert published()["table1"]["cifar10-k10-a0.1"]["fedu2-byol"] == [85.58, 78.64, 86.24]
    assert published()["table2"]["cifar100-k10-a5"]["orchestra"] == [34.93]


def test_every_cell_is_a_valid_experiment_of_its_setting() -> None:
    for name in exhibits:
        for cell in exhibits[name].all_cells():
            experiment = cell.experiment(seed=3)
            assert experiment.seed == 3
            if cell.setting not in ("sample", "tuning"):
                few = f"c{experiment.split.classes_per_client}"
                deal = few if experiment.partition == "classes" else f"a{experiment.alpha:g}"
                assert f"{experiment.dataset}-k{experiment.clients}-{deal}" == cell.setting
                assert experiment.participation == (0.5 if experiment.clients == 100 else 1.0)
                assert experiment.rounds * experiment.participation <= 100
                if name != "rounds":
                    assert experiment.rounds * experiment.participation == rows.RECIPE["rounds"]
                assert experiment.data.validation == 0


def test_cells_of_one_name_are_one_configuration() -> None:
    found: dict[str, Experiment] = {}
    for name in exhibits:
        for cell in exhibits[name].all_cells():
            assert found.setdefault(cell.name, cell.experiment(0)) == cell.experiment(0)
    assert len({str(experiment) for experiment in found.values()}) == len(found)  # and no two names share one


def test_ablations_and_sweeps_change_one_thing() -> None:
    usual = plan.cell(plan.HOME, "fedu2-byol").experiment(0).flat()

    def changed(cell: Cell) -> dict[str, Any]:
        return {key: value for key, value in cell.experiment(0).flat().items() if value != usual[key]}

    assert changed(plan.cell(plan.HOME, "fedu2-byol-without-fur")) == {"fur.weight": 0}
    assert changed(plan.cell(plan.HOME, "fedu2-byol-without-eua")) == {"aggregator": "fedavg"}
    weights = exhibits["figure4"].series[0].cells
    assert list(weights) == pytest.approx([0, 0.2, 1, 2, 4, 10])
    assert [changed(cell).get("fur.weight", 2.0) for cell in weights.values()] == list(weights)
    assert [c.experiment(0).local_epochs for c in exhibits["figure5a"].series[1].cells.values()] == [5, 10, 20, 50]
    assert [c.experiment(0).clients for c in exhibits["figure5b"].series[0].cells.values()] == [5, 10, 20, 50, 100]


def test_harder_partitions_differ_from_the_tables_in_nothing_else() -> None:
    for cell in exhibits["harder"].cells:
        usual = plan.cell(plan.HOME, cell.row).experiment(0).flat()
        own = {key: value for key, value in cell.experiment(0).flat().items() if value != usual[key]}
        classes = int(cell.setting[-1])
        own.pop("alpha", None)
        assert own.pop("split.classes_per_client", 2) == classes  # 2 is the default
        assert own == {"partition": "classes"}
    assert plan.setting_title("cifar10-k10-c1") == "CIFAR-10, K = 10, 1 class a client"
    assert plan.setting_title("cifar10-k10-c2") == "CIFAR-10, K = 10, 2 classes a client"


@pytest.mark.parametrize(
    ("name", "key", "values"),
    [("rounds", "rounds", (15, 30, 60, 100)), ("rates", "optimizer.lr", (0.025, 0.05, 0.1, 0.2))],
)
def test_sweeps_over_the_recipe_differ_in_one_key(name: str, key: str, values: tuple[float, ...]) -> None:
    for line, row in zip(exhibits[name].series, ("fedbyol", "fedu2-byol"), strict=True):
        usual = plan.cell(plan.HOME, row)
        assert {value: cell.experiment(0) for value, cell in line.cells.items()} == {
            value: usual.experiment(0).with_(**{key: value}) for value in values
        }
        assert line.cells[rows.RECIPE[key]] == usual


def _own(row: str) -> dict[str, Any]:
    """What a row has of its own, among the keys that were tried for its method."""
    resolved = plan.cell(plan.HOME, row).experiment(0).flat()
    return {key: resolved[key] for key in rows.TRIES[row][0]}


@pytest.mark.parametrize("row", rows.TRIES)
def test_every_method_has_three_tries_on_validation_images_and_the_first_is_its_default(row: str) -> None:
    method, tried = rows.ROWS[row].settings["method"], [cell.experiment(0) for cell in plan.tries(row)]
    assert len(tried) == 3
    assert all(experiment.data.validation > 0 for experiment in tried)
    default = Experiment.parse({"dataset": "cifar10", "method": method}).flat()
    keys = set(rows.TRIES[row][0])
    assert {key: tried[0].flat()[key] for key in keys} == {key: default[key] for key in keys}
    usual = plan.cell(plan.HOME, row).experiment(0).flat()
    allowed = {*rows.TRY_SETTINGS, *rows.ROW_TRY_SETTINGS.get(row, {}), *keys}
    for experiment in tried:
        changed = {key for key, value in experiment.flat().items() if value != usual[key]}
        assert changed <= {*allowed, "fur.until"}  # which has no meaning with a constant schedule
    assert _own(row) in [{**values} for values in rows.TRIES[row]]


def test_all_rows_with_something_of_their_own_were_tried() -> None:
    """But for those that are nothing beyond an objective whose settings are the recipe's."""
    ablations = {row for row in rows.ROWS if "-without-" in row}
    assert set(rows.ROWS) - ablations - set(rows.TRIES) == {"fedsimsiam", "fedbyol"}
    assert set(rows.OWN) <= set(rows.TRIES)


@pytest.mark.parametrize("ablation", [row for row in rows.ROWS if "-without-" in row])
def test_ablations_have_what_the_whole_was_tuned_to(ablation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, part = rows.ROWS["fedu2-byol"].settings, rows.ROWS[ablation].settings
    assert {key for key in {**whole, **part} if whole.get(key) != part.get(key)} in ({"fur.weight"}, {"aggregator"})
    monkeypatch.setitem(rows.OWN, "fedu2-byol", {"fur.temperature": 0.7})
    assert rows._row(ablation, "", "fedu2", "byol")[1].settings["fur.temperature"] == 0.7


def test_rows_with_an_objective_share_what_that_was_tuned_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(rows.OWN, "fedsimclr", {"simclr.temperature": 0.2})
    assert rows._row("fedu2-simclr", "", "fedu2", "simclr")[1].settings["simclr.temperature"] == 0.2
    assert "simclr.temperature" not in rows._row("fedu2-byol", "", "fedu2", "byol")[1].settings


@pytest.mark.parametrize("row", rows.TRIES)
def test_tables_have_what_the_tries_found(row: str) -> None:
    """As soon as all tries of a row have records: the best, if it beats the default by the margin."""
    results = Path(__file__).parent.parent / "results" / "paper"
    scores = [measured(list(records_of(cell, results)), "knn") for cell in plan.tries(row)]
    if not all(score.values for score in scores):
        pytest.skip("not all tries have been played")
    best = max(range(len(scores)), key=lambda position: scores[position].mean)
    chosen = best if scores[best].mean >= scores[0].mean + rows.MARGIN else 0
    assert _own(row) == {**rows.TRIES[row][chosen]}


def test_the_command_line_knows_what_the_plan_has() -> None:
    assert {*cli.EXHIBITS, *cli.SWEEPS, *cli.PICTURES} == set(exhibits)
    assert set(cli.SWEEPS) == set(page.SWEEPS)


def test_cells_are_chosen_by_name_setting_or_row() -> None:
    cells = exhibits["table1"].all_cells()
    assert [c.name for c in choose_cells(cells, ["cifar10-k10-a0.1/fedbyol"])] == ["cifar10-k10-a0.1/fedbyol"]
    assert len(choose_cells(cells, ["fedbyol"])) == 4
    assert len(choose_cells(cells, ["cifar10-k100-a0.1", "cifar10-k100*"])) == 12
    assert choose_cells(cells, []) == cells
    with pytest.raises(UsageError, match=r"no cell fits 'fedbyo'.*did you mean 'fedbyol'"):
        choose_cells(cells, ["fedbyo"])


# Records


def test_a_record_tells_all(place: Path) -> None:
    record = read(place / "results" / "micro" / "one" / "seed-0.json")
    content = record.content
    assert (content["cell"], content["seed"], content["commit"]) == ("micro/one", 0, "abc")
    assert content["experiment"]["fur.weight"] == 2.0
    assert "data.root" not in content["experiment"]
    assert {"torch", "device", "fedu2"} <= set(content["environment"])
    assert [line["round"] for line in content["history"]] == [0, 1, 2]
    assert [entry["protocol"] for entry in content["evaluation"]] == ["knn"]
    assert record.finished
    assert record.score("knn") == content["evaluation"][0]["mean"]
    assert record.score("linear") is None
    assert record.seconds() > 0


def test_a_figure_changed_by_hand_is_refused(place: Path, micro_table: Exhibit) -> None:
    path = place / "results" / "micro" / "one" / "seed-0.json"
    text = path.read_text()
    path.write_text(text.replace('"mean": ', '"mean": 9'))
    with pytest.raises(DataError, match="changed afterwards"):
        read(path)
    sheet = sheets("micro", micro_table, place / "results")[0]
    assert sheet.rows[0][1] == ""
    assert "changed afterwards" in sheet.remarks[0]
    path.write_text(text[:-20])
    with pytest.raises(DataError, match="damaged"):
        read(path)


@pytest.mark.parametrize(
    ("part", "name", "value"),
    [
        ("history", "seconds", "5"),
        ("history", "seconds", -1.0),
        ("history", "round", 1.5),
        ("evaluation", "values", [float("nan")]),
        ("evaluation", "values", [1e308, 1e308]),
        ("evaluation", "values", [-5.0]),
    ],
)
def test_what_is_no_such_number_is_refused_whatever_its_digest(
    place: Path, part: str, name: str, value: object
) -> None:
    path = place / "results" / "micro" / "one" / "seed-0.json"
    content = json.loads(path.read_text())
    content[part][-1][name] = value
    content["digest"] = digest_of({key: kept for key, kept in content.items() if key != "digest"})
    path.write_text(json.dumps(content))
    with pytest.raises(DataError, match="not a record"):
        read(path)


def test_the_record_of_another_configuration_is_refused(place: Path) -> None:
    other = _cell("one", local_epochs=7)
    with pytest.raises(DataError, match="a record of something else than micro/one"):
        list(records_of(other, place / "results"))
    moved = Cell("micro", "two", "TWO", CELLS[0].values)  # right settings, wrong name
    shutil.copy(path_of(CELLS[0], 0, place / "results"), path_of(CELLS[1], 0, place / "results"))
    with pytest.raises(DataError, match="something else"):
        list(records_of(moved, place / "results"))


def test_a_run_of_something_else_makes_no_record(place: Path) -> None:
    run = Campaign(place / "runs", place / "results").run_of(CELLS[1], 0)
    with pytest.raises(TrainingError, match=r"not of cell micro/one: it has other values of fur\.weight"):
        write(place / "x.json", CELLS[0], run, "", {})
    assert not (place / "x.json").exists()


def test_keys_that_change_no_result_may_differ(place: Path) -> None:
    elsewhere = _cell("one", device="cpu", checkpoint_every=7, **{"engine.lanes": 1, "data.download": False})
    assert len(list(records_of(elsewhere, place / "results"))) == 1


def test_the_further_record_is_kept(tmp_path: Path) -> None:
    def campaign(runs: str) -> Campaign:
        return Campaign(tmp_path / runs, tmp_path / "results", protocols=("knn",))

    (whole,) = campaign("first").play(CELLS[:1], [0], Deadline(None), lambda *_: [])
    assert campaign("first").complete(whole)
    path = path_of(CELLS[0], 0, tmp_path / "results")
    before = path.read_text()
    run = Campaign(tmp_path / "second", tmp_path / "results").run_of(CELLS[0], 0)
    from fedu2.run import train

    train(CELLS[0].experiment(0), run.path, time_limit=0.0)
    assert write(path, CELLS[0], run, "", {}).rounds == 2
    assert path.read_text() == before


def test_the_commit_is_that_of_the_checkout() -> None:
    found = commit()
    assert found == "" or len(found.rstrip("+")) == 40


@pytest.mark.parametrize("name", ["seed-1.json", "seed-0-backup.json"])
def test_a_copy_is_no_further_seed(place: Path, micro_table: Exhibit, name: str) -> None:
    path = path_of(CELLS[0], 0, place / "results")
    shutil.copy(path, path.with_name(name))
    sheet = sheets("micro", micro_table, place / "results")[0]
    assert sheet.rows[0][-1] == ""
    assert "something else" in sheet.remarks[0]


def test_knn_of_training_with_other_settings_is_not_the_papers(place: Path) -> None:
    record = read(path_of(CELLS[0], 0, place / "results"))
    assert record.score("knn") is not None
    assert _with(record, evaluation=[]).score("knn") is None  # though the history has one


def test_a_measurement_changed_by_hand_makes_no_record(place: Path) -> None:
    campaign = Campaign(place / "runs", place / "results")
    file = campaign.run_of(CELLS[0], 0).path / "evaluation.json"
    file.write_text(file.read_text().replace('"mean": ', '"mean": 9'))
    with pytest.raises(DataError, match="was changed after it was measured"):
        write(place / "x.json", CELLS[0], campaign.run_of(CELLS[0], 0), "", {})
    assert not (place / "x.json").exists()


# Campaigns


def test_measurements_with_other_settings_do_not_count_as_done(place: Path) -> None:
    campaign = Campaign(place / "runs", place / "results", protocols=("linear",), protocol_seeds=1)
    evaluate(campaign.run_of(CELLS[0], 0), ["linear"], parse_protocols(["linear.epochs=1"]), seeds=1)
    assert not campaign.complete(read(path_of(CELLS[0], 0, place / "results")))
    (record,) = campaign.play(CELLS[:1], [0], Deadline(None), lambda *_: [])
    assert campaign.complete(record)
    assert record.score("linear") is not None


def test_the_record_of_another_cell_is_not_taken_for_done_nor_replaced(place: Path) -> None:
    wrong = path_of(CELLS[1], 0, place / "results")
    shutil.copy(path_of(CELLS[0], 0, place / "results"), wrong)
    before = wrong.read_text()
    campaign = Campaign(place / "runs", place / "results", protocols=("linear",))
    with pytest.raises(DataError, match="something else than micro/two"):
        list(campaign.play(CELLS[1:], [0], Deadline(None), lambda *_: []))
    assert wrong.read_text() == before


def test_a_slice_that_is_over_begins_no_other_cell(tmp_path: Path) -> None:
    campaign = Campaign(tmp_path / "runs", tmp_path / "results", protocols=())
    played = list(campaign.play([_cell("one", rounds=1), CELLS[1]], [0], Deadline(0.0), lambda *_: []))
    assert [record.cell for record in played] == ["micro/one"]


def test_fine_tuning_goes_on_with_the_share_that_is_missing(place: Path) -> None:
    campaign = Campaign(place / "runs", place / "results")
    run = campaign.run_of(CELLS[0], 0)
    options = parse_protocols(["finetune.epochs=1", "finetune.fractions=[0.01, 0.1]"])
    first = assess(run, ["finetune"], options, seeds=1, enough=lambda: True)
    assert list(first.scores) == ["finetune 1 %"]
    second = assess(run, ["finetune"], options, seeds=1, skip=list(first.scores))
    assert list(second.scores) == ["finetune 10 %"]
    kept_now = [e for e in kept(run) if e["protocol"].startswith("finetune")]
    assert [e["options"]["finetune"]["fractions"] for e in kept_now] == [[0.01, 0.1]] * 2


def test_unknown_protocols_are_told_before_training(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="unknown protocol 'nosuch'"):
        Campaign(tmp_path, tmp_path, protocols=("nosuch",))


def test_a_campaign_in_slices_of_time(place: Path, tmp_path: Path) -> None:
    def campaign() -> Campaign:
        return Campaign(tmp_path / "runs", tmp_path / "results", protocols=("knn", "linear"), protocol_seeds=1)

    seen = []
    for _ in range(10):  # with no time at all, a slice is a round or a protocol
        record = next(iter(campaign().play(CELLS[:1], [0], Deadline(0.01), lambda *_: [])))
        seen.append(record.progress)
        if campaign().complete(record):
            break
    whole = read(path_of(CELLS[0], 0, place / "results"))
    sliced = read(path_of(CELLS[0], 0, tmp_path / "results"))
    assert seen == [(1, 0), (2, 0), (2, 1), (2, 2)]
    assert campaign().complete(sliced)
    ours, theirs = ([line.get("loss") for line in r.content["history"]] for r in (sliced, whole))
    assert ours == theirs


def test_time_for_protocols(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A slice that ends with training leaves the protocols to the next one, which begins with them."""
    campaign = Campaign(tmp_path / "runs", tmp_path / "results", protocols=("knn",))
    monkeypatch.setattr(Deadline, "left", property(lambda self: 0.29 * self.seconds))
    (record,) = campaign.play(CELLS[:1], [0], Deadline(1000.0), lambda *_: [])
    assert record.finished
    assert not campaign.complete(record)
    monkeypatch.undo()
    (record,) = campaign.play(CELLS[:1], [0], Deadline(1000.0), lambda *_: [])
    assert campaign.complete(record)


def test_complete_records_are_left_alone(place: Path) -> None:
    shutil.rmtree(place / "runs")
    campaign = Campaign(place / "runs", place / "results", protocols=("knn",))
    assert len(list(campaign.play(CELLS, [0], Deadline(None), lambda *_: []))) == 2
    assert not list((place / "runs").iterdir())


def test_a_record_that_lacks_something_and_has_no_run_is_made_anew_and_that_is_told(
    place: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.rmtree(place / "runs")
    campaign = Campaign(place / "runs", place / "results", protocols=("knn", "linear"), protocol_seeds=1)
    assert not campaign.complete(read(path_of(CELLS[0], 0, place / "results")))
    with caplog.at_level("INFO", "fedu2"):
        (record,) = campaign.play(CELLS[:1], [0], Deadline(None), lambda *_: [])
    assert campaign.complete(record)
    assert "micro/one, seed 0: its record lacks linear, its run is gone: trained anew" in caplog.text


def test_two_campaigns_share_the_cells(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The other one begins while the first is in the middle of its first cell, and takes the second."""
    cells = [_cell("one", rounds=1), _cell("two", rounds=1)]
    first, other = (Campaign(tmp_path / "runs", tmp_path / "results", protocols=()) for _ in range(2))
    taken: list[str] = []

    class Begin(Callback):
        def on_round(self, record: Mapping[str, Any]) -> None:
            taken.extend(record.cell for record in other.play(cells, [0], Deadline(None), lambda *_: []))

    def watch(cell: Cell, seed: int) -> list[Callback]:
        return [Begin()] if cell is cells[0] else []

    with caplog.at_level("INFO", "fedu2"):
        played = [record.cell for record in first.play(cells, [0], Deadline(None), watch)]
    assert set(taken) == {"micro/two"}
    assert "micro/one, seed 0: another process is at it" in caplog.text
    assert played == ["micro/one", "micro/two"]


def test_a_cell_that_another_process_is_at_is_told(
    place: Path, micro_table: Exhibit, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(exhibits._parts, "table2", micro_table)
    command = ["paper", "run", "table2", "device=cpu", "--cells", "one,two", "--protocol", "knn", "--seeds", "0"]
    places = ["--results", str(place / "results"), "--runs", str(place / "runs")]
    path_of(CELLS[0], 0, place / "results").unlink()
    with Campaign(place / "runs", place / "results")._claim(CELLS[0], 0) as ours:
        assert ours
        assert main([*command, *places]) == 75
    told = capsys.readouterr().err
    assert "micro/one, seed 0: another process is at it" in told
    assert "1 of 2 runs are complete" in told
    assert main([*command, *places]) == 0


@pytest.mark.parametrize("setting", ["rounds=3", "seed=1", "fur.weight=0", "method=fedbyol"])
def test_settings_that_would_change_a_result_are_refused(tmp_path: Path, setting: str) -> None:
    with pytest.raises(UsageError, match="would change the result"):
        Campaign(tmp_path, tmp_path, [setting])
    Campaign(tmp_path, tmp_path, ["device=cpu", "data.root=/x", "engine.lanes=1"])


# Tables


def test_a_table_from_records(place: Path, micro_table: Exhibit) -> None:
    sheet = sheets("micro", micro_table, place / "results")[0]
    score = read(path_of(CELLS[0], 0, place / "results")).score("knn")
    assert score is not None
    assert list(sheet.header) == ["method", "kNN", "paper", "difference", "LP", "paper", "difference", "seeds"]
    assert sheet.rows[0] == ["ONE", f"{score:.2f}", "10.00", f"{score - 10:+.2f}", "", "20.00", "", "1"]
    assert sheet.rows[1][2:] == ["", "", "", "", "", "1"]  # nothing published, no linear probe
    text = markdown(sheet)
    assert f"| ONE | {score:.2f} | 10.00 | {score - 10:+.2f} |  | 20.00 |  | 1 |" in text
    assert text.startswith("### Micro: micro\n")


def _with(record: Record, **changes: Any) -> Record:
    return Record(record.path, {**record.content, **changes})


def test_seeds_are_averaged_and_other_measurements_left_out(place: Path) -> None:
    record = read(path_of(CELLS[0], 0, place / "results"))
    entry = record.content["evaluation"][0]

    def scored(**changes: Any) -> Record:
        return _with(record, evaluation=[{**entry, "protocol": "linear", "values": [50.0], **changes}])

    assert measured([scored(), scored(values=[52.0, 56.0])], "linear").values == (50.0, 54.0)
    assert measured([scored(encoder="best")], "linear").values == ()
    assert measured([scored(round=1)], "linear").values == ()
    assert measured([scored(data="/my/folder")], "linear").values == ()
    options = {**entry["options"], "linear": {**entry["options"]["linear"], "epochs": 3}}
    assert measured([scored(options=options)], "linear").values == ()
    assert measured([_with(record, history=record.content["history"][:2])], "knn").values == ()


def test_unfinished_cells_stay_empty_and_are_told(tmp_path: Path, micro_table: Exhibit) -> None:
    campaign = Campaign(tmp_path / "runs", tmp_path / "results", protocols=("knn",))
    (record,) = campaign.play(CELLS[:1], [0], Deadline(0.01), lambda *_: [])
    assert record.rounds == 1
    sheet = sheets("micro", micro_table, tmp_path / "results")[0]
    assert sheet.rows[0][1] == ""
    assert sheet.remarks == ["micro/one, seed 0: round 1 of 2, not in the table"]


# The command line


def test_run_then_show(
    tmp_path: Path, micro_table: Exhibit, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(exhibits._parts, "table2", micro_table)
    monkeypatch.setitem(published(), "table2", published()["micro"])  # type: ignore[arg-type]
    places = ["--results", str(tmp_path / "results"), "--runs", str(tmp_path / "runs")]
    command = ["paper", "run", "table2", "device=cpu", "--cells", "one,two", "--protocol", "knn", "--seeds", "0-1"]
    assert main([*command, *places, "--time-limit", "0"]) == 75
    assert "0 of 4 runs are complete; the same command goes on" in capsys.readouterr().err
    assert main([*command, *places]) == 0
    assert re.search(r"micro/two: seed 1: 2 rounds in \d+\.\d min, kNN", capsys.readouterr().out.replace("\n", " "))
    assert main(["paper", "list", "table2", *places[:2]]) == 0
    assert "micro/one" in capsys.readouterr().out
    assert main(["paper", "table2", "--markdown", *places[:2]]) == 0
    shown = capsys.readouterr().out
    assert "| ONE | " in shown
    assert " ± " in shown  # two seeds
    monkeypatch.setenv("COLUMNS", "120")
    assert main(["paper", "table2", *places[:2]]) == 0
    assert "difference" in capsys.readouterr().out
    monkeypatch.setenv("COLUMNS", "30")  # too narrow for anything: differences go, figures are never cut
    assert main(["paper", "table2", *places[:2]]) == 0
    shown = capsys.readouterr().out
    assert "difference" not in shown
    assert "…" not in shown
    assert re.search(r"│ ONE +│ +\d+\.\d\d ± \d+\.\d\d │", shown)
    assert main(["paper", "list", *places[:2]]) == 0
    assert "table1" in capsys.readouterr().out


def test_a_sweep_is_drawn_from_records(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    line = Series("FedU²", {0.0: CELLS[1], 0.1: CELLS[0], 0.5: _cell("three", **{"fur.weight": 0.5})})
    monkeypatch.setitem(exhibits._parts, "figure4", Exhibit("Figure 4", ("knn",), series=[line], axis="λ_U"))
    out = place / "pictures"
    assert main(["paper", "figure4", "--results", str(place / "results"), "--out", str(out)]) == 0
    assert sorted(path.name for path in out.iterdir()) == ["figure4.png", "figure4.svg"]
    assert main(["paper", "figure4", "--results", str(place / "nothing"), "--out", str(place / "none")]) == 0
    assert "no finished record yet" in capsys.readouterr().out
    assert not (place / "none").exists()


def test_pictures_of_methods_need_their_runs(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["paper", "figure1", "--runs", str(place / "nothing")]) == 2
    assert "has no runs of cifar10-k10-a0.1/fedbyol" in capsys.readouterr().err.replace("\n", "")
    monkeypatch.setattr("fedu2.paper.command.FIGURE_METHODS", CELLS)
    assert main(["paper", "figure1", "--runs", str(place / "runs"), "--out", str(place / "out")]) == 0
    assert (place / "out" / "figure1.png").stat().st_size > 5000


def test_the_pictures_of_the_readme_and_their_numbers(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pictures, "FIGURE_METHODS", (*CELLS, _cell("never-run")))
    shutil.copytree(place / "results", place / "root" / "results" / "paper")
    pictures.main([str(place / "runs")], place / "root")
    written = json.loads((place / "root" / "results" / "pictures.json").read_text())
    assert [numbers["cell"] for numbers in written] == ["micro/one", "micro/two"]
    assert all(numbers["commit"] == "abc" and numbers["round"] == 2 for numbers in written)
    assert all(len(numbers["linear_cka_to_global"]) == 2 for numbers in written)
    drawn = sorted(path.name for path in (place / "root" / "docs" / "pictures").iterdir())
    assert drawn == ["spectrum.png", "tsne.png"]
    with pytest.raises(UsageError, match="seed 1"):
        pictures.main([str(place / "runs"), "--seed", "1"], place / "root")


@pytest.mark.parametrize(("text", "seeds"), [("0", [0]), ("0,2,5", [0, 2, 5]), ("1-3", [1, 2, 3])])
def test_seeds_are_written_in_a_row(text: str, seeds: list[int]) -> None:
    assert parse_seeds(text) == seeds


@pytest.mark.parametrize("text", ["", "a", "3-1", "1,,2", "-1", "0-9999999999"])
def test_seeds_that_are_none(text: str) -> None:
    with pytest.raises(UsageError, match="--seeds"):
        parse_seeds(text)


def test_records_in_the_repository_are_whole() -> None:
    """Every record under results/paper can be read, and stands in a cell of the plan."""
    root = Path(__file__).parent.parent / "results" / "paper"
    cells = {cell.name for name in exhibits for cell in exhibits[name].all_cells()}
    for path in root.rglob("seed-*.json"):
        record = read(path)
        assert record.cell in cells
        assert path == path_of(Cell(*record.cell.split("/"), "", {}), record.seed, root)
        assert json.loads(path.read_text())["digest"]
