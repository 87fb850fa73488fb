"""What is published of the records: the page, the README's table, the recipes."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from tools import pictures, publish

from fedu2.cli import main
from fedu2.errors import DataError, UsageError
from fedu2.evaluation.options import Protocols
from fedu2.experiment import Experiment
from fedu2.files import digest_of
from fedu2.methods import resolve
from fedu2.paper import pace, plan, rows
from fedu2.paper.page import SWEEPS, gather, machines, page
from fedu2.paper.plan import HOME, OWN_TABLES, PROTOCOLS, TABLES, Cell, exhibits
from fedu2.paper.records import Record, path_of, read
from fedu2.paper.tables import groups
from fedu2.parsing import leaves

ROOT = Path(__file__).parents[1]
FEDBYOL, FEDU, FEDU2 = (plan.cell(HOME, row) for row in ("fedbyol", "fedu-byol", "fedu2-byol"))
SCORES = {"knn": 80.0, "linear": 82.5, "finetune 1 %": 70.0, "finetune 10 %": 81.0}
H200 = {"fedu2": "0.1.0", "torch": "2.11.0", "device": "cuda: NVIDIA H200"}


def _record(
    results: Path, cell: Cell, seed: int = 0, scores: Mapping[str, float] = SCORES, minutes: float = 20.0, **other: Any
) -> Path:
    """A record as the program would have written it, of a run that nobody made."""
    experiment = cell.experiment(seed)
    common = {"encoder": "last", "round": experiment.rounds, "data": experiment.dataset, "seeds": 1}
    options = Protocols().model_dump(mode="json")
    content = {
        "format": 1,
        "cell": cell.name,
        "seed": seed,
        "commit": "0123456789",
        "environment": H200,
        "experiment": {key: value for key, value in experiment.flat().items() if key != "data.root"},
        "evaluation": [
            {**common, "options": options, "protocol": name, "values": [value], "seconds": 30.0}
            for name, value in scores.items()
        ],
        "history": [{"round": experiment.rounds, "seconds": 60 * minutes - 30 * len(scores)}],
        **other,
    }
    path = path_of(cell, seed, results)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**content, "digest": digest_of(content)}))
    return path


def _page(results: Path) -> str:
    return page(gather(results))


def _section(text: str, title: str) -> str:
    """The part of a page below the heading that begins like this."""
    found = re.search(rf"^(#+) {re.escape(title)}.*?\n(.*?)(?=^#{{1,3}} |\Z)", text, flags=re.M | re.S)
    assert found is not None, title
    return found[2]


def _row(text: str, method: str) -> list[str]:
    (line,) = [line for line in text.splitlines() if line.startswith(f"| {method} |")]
    return [cell.strip() for cell in line.strip("|").split("|")]


def _table1(text: str) -> str:
    return _section(text[text.index("## Table 1") :], "CIFAR-10, K = 10, α = 0.1")


# The page


def test_a_page_without_records_names_what_it_waits_for(tmp_path: Path) -> None:
    text = _page(tmp_path / "nothing")
    assert "|" not in text
    for name in (*TABLES, *OWN_TABLES, *SWEEPS):
        waiting = _section(text, exhibits[name].title)
        assert waiting.strip() == f"No finished records yet: {'; '.join(g.title for g in groups(exhibits[name]))}."
    tuned = ", ".join(rows.ROWS[row].title for row in rows.TRIES)
    assert _section(text, exhibits["tuning"].title).strip() == f"Not all tries have records yet: {tuned}."


def test_the_course_of_training_is_shown_by_round(tmp_path: Path) -> None:
    assert _section(_page(tmp_path), pace.TITLE).strip() == "No finished records yet."
    last = rows.RECIPE["rounds"]
    for seed, early in ((0, 60.0), (1, 62.0)):
        judged = [{"round": 10, "knn": early}, {"round": 20, "bytes_up": 10**9}, {"round": last, "knn": 80.0}]
        _record(tmp_path, FEDBYOL, seed, history=judged)
    _record(tmp_path, FEDU, history=[{"round": 10, "knn": 50.0}])  # not finished
    text = _section(_page(tmp_path), pace.TITLE)
    known = dict(zip(_row(text, "method"), _row(text, "FedBYOL"), strict=True))
    assert {title: shown for title, shown in known.items() if shown} == {
        "method": "FedBYOL",
        "round 10": "61.00 ± 1.41",
        f"round {last}": "80.00 ± 0.00",
        "GB": "1.0",
        "seeds": "2",
    }
    assert "FedU-BYOL" not in text


def test_the_common_setting_has_the_rows_of_both_tables_in_the_papers_order() -> None:
    found = [cell.row for cell in plan.home_cells()]
    assert found == [row for row in rows.ROWS if row in found]
    assert {"fedsimsiam", "fedu2-byol-without-fur", *rows.BESIDE} <= set(found)  # of one table, of the other, of none
    assert all(cell.setting == HOME for cell in plan.home_cells())


@pytest.mark.parametrize("knn", [-1.0, 101.0, "80", float("nan"), [80.0], None])
def test_a_record_whose_course_is_no_accuracy_is_refused(tmp_path: Path, knn: Any) -> None:
    path = _record(tmp_path, FEDBYOL, history=[{"round": rows.RECIPE["rounds"], "knn": knn}])
    with pytest.raises(DataError, match="not a record"):
        read(path)


def test_tries_are_shown_when_all_of_a_row_have_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    title, (first, second, third) = exhibits["tuning"].title, plan.tries("fedema-byol")
    _record(tmp_path, first, scores={"knn": 36.0})
    _record(tmp_path, second, scores={"knn": 36.5})
    assert "|" not in _section(_page(tmp_path), title)
    _record(tmp_path, third, scores={"knn": 38.0})
    told = [f"`fedema.tau={tau}`" for tau in (0.7, 0.5, 0.9)]
    row = _row(_section(_page(tmp_path), title), "FedEMA-BYOL")
    assert row[1:] == [f"{told[0]}: **36.00**", f"{told[1]}: 36.50", f"{told[2]}: 38.00"]
    tuned = replace(rows.ROWS["fedema-byol"], settings={**rows.ROWS["fedema-byol"].settings, "fedema.tau": 0.9})
    monkeypatch.setitem(rows.ROWS, "fedema-byol", tuned)
    row = _row(_section(_page(tmp_path), title), "FedEMA-BYOL")
    assert row[1:] == [f"{told[0]}: 36.00", f"{told[1]}: 36.50", f"{told[2]}: **38.00**"]


def test_the_page_tells_the_recipe_of_the_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = _page(tmp_path)
    assert f"`rounds={rows.RECIPE['rounds']}`" in text
    lines = {line.partition(": ")[0]: line for line in text.splitlines()}
    assert "`fur.weight=0`" in lines["- FedU²-BYOL without FUR"]
    assert f"`participation={plan.PARTICIPATION}`" in lines["- K = 100"]
    monkeypatch.setitem(rows.RECIPE, "optimizer.lr", 0.987)
    assert "`optimizer.lr=0.987`" in _page(tmp_path)


def test_figures_seeds_and_minutes(tmp_path: Path) -> None:
    _record(tmp_path, FEDU2, 0, minutes=20)
    _record(tmp_path, FEDU2, 1, {**SCORES, "linear": 83.5}, minutes=23)
    text = _page(tmp_path)
    theirs = plan.published()["table1"][HOME]["fedu2-byol"]
    row = _row(_table1(text), "FedU²-BYOL")
    assert row[1:4] == ["**83.00 ± 0.71**", f"{theirs[0]:.2f}", f"{83 - theirs[0]:+.2f}"]
    assert row[-2:] == ["2", "21.5"]
    assert _row(_table1(text), "FedBYOL")[1] == ""
    assert _row(_table1(text), "FedBYOL")[-2:] == ["", ""]
    assert _row(text[text.index("## Table 2") :].partition("## Figure")[0], "FedU²-BYOL")[1] == "**80.00 ± 0.00**"
    assert "CIFAR-10, K = 10, α = 0.1" not in text[text.index("No finished records yet") :].partition("\n")[0]


def test_rows_stand_in_the_order_of_the_paper(tmp_path: Path) -> None:
    _record(tmp_path, FEDU2)
    text = _table1(_page(tmp_path))
    titles = [rows.ROWS[row].title for row in plan.published()["table1"][HOME]]
    assert re.findall(r"^\| (\S.*?) \|", text, flags=re.M)[2 : 2 + len(titles)] == titles


def test_the_best_of_ours_is_bold_and_so_are_ties(tmp_path: Path) -> None:
    _record(tmp_path, FEDBYOL, scores={**SCORES, "linear": 85.001, "finetune 1 %": 9.5})
    _record(tmp_path, FEDU, scores={**SCORES, "linear": 84.999, "finetune 1 %": 10.0})
    _record(tmp_path, FEDU2, scores={**SCORES, "linear": 84.0, "finetune 1 %": 1.0})
    text = _table1(_page(tmp_path))
    assert [_row(text, cell.title)[1] for cell in (FEDBYOL, FEDU, FEDU2)] == ["**85.00**", "**85.00**", "84.00"]
    assert [_row(text, cell.title)[4] for cell in (FEDBYOL, FEDU, FEDU2)] == ["9.50", "**10.00**", "1.00"]


def test_remarks_tell_machines_versions_and_commits(tmp_path: Path) -> None:
    _record(tmp_path, FEDBYOL)
    _record(tmp_path, FEDU2, 0, commit="fedcba98765+")
    _record(tmp_path, FEDU2, 1, environment={**H200, "device": "cuda: NVIDIA A100"})
    text = _table1(_page(tmp_path))
    assert "- machines: NVIDIA H200 (2 runs); NVIDIA A100 (1 run)\n" in text
    assert "- versions: fedu2 0.1.0, torch 2.11.0 (3 runs)\n" in text
    assert "- commits: 0123456 (2 runs); fedcba9+ (1 run); +: with changes that were not committed\n" in text
    assert "- repetitions of each protocol on one encoder: 1 (3 runs)\n" in text


def test_a_record_that_is_not_judged_yet_has_no_time(tmp_path: Path) -> None:
    _record(tmp_path, FEDU2, scores={"knn": 80.0})
    text = _page(tmp_path)
    assert _row(_table1(text), "FedU²-BYOL")[1] == ""
    assert _row(_table1(text), "FedU²-BYOL")[-2:] == ["", ""]
    assert _row(text[text.index("## Table 2") :].partition("## Figure")[0], "FedU²-BYOL")[-2:] == ["1", "20.0"]


def test_damaged_and_unfinished_records_are_named_and_do_not_count(tmp_path: Path) -> None:
    _record(tmp_path, FEDBYOL)
    path = _record(tmp_path, FEDU2)
    path.write_text(path.read_text().replace("82.5", "99.5"))
    _record(tmp_path, FEDU, history=[{"round": 3, "seconds": 1.0}])
    elsewhere = plan.cell("cifar100-k10-a0.1", "fedbyol")
    _record(tmp_path, elsewhere).write_text("{}")
    text = _page(tmp_path)
    assert _row(_table1(text), "FedU²-BYOL")[1] == ""
    assert f"- {HOME}/fedu2-byol/seed-0.json is not a record as this program wrote it" in _table1(text)
    assert f"- {FEDU.name}, seed 0: round 3 of {rows.RECIPE['rounds']}, not in the table" in _table1(text)
    assert "99.5" not in text
    assert "machines: NVIDIA H200 (1 run)" in text
    waiting = text[text.index("No finished records yet") :].partition("## ")[0]
    assert "CIFAR-100, K = 10, α = 0.1" in waiting
    assert "- cifar100-k10-a0.1/fedbyol/seed-0.json is not a record" in waiting  # though its setting has no sheet
    assert str(tmp_path) not in text


def test_sweeps_are_shown_where_there_are_records(tmp_path: Path) -> None:
    line = exhibits["figure4"].series[0]
    for x, cell in list(line.cells.items())[:2]:
        _record(tmp_path, cell, scores={**SCORES, "linear": 80 + x})
    text = _page(tmp_path)
    sweep = _section(text[text.index("## Figure 4") :], line.title)
    first, second, third = list(line.cells)[:3]
    assert _row(sweep, f"{first:g}") == [f"{first:g}", f"{80 + first:.2f}", "1", "20.0"]
    assert _row(sweep, f"{second:g}")[1] == f"**{80 + second:.2f}**"
    assert _row(sweep, f"{third:g}")[1:] == ["", "", ""]
    assert f"No finished records yet: {exhibits['figure4'].series[1].title}." in text


@pytest.mark.parametrize(
    "environment", [None, [], "H200", {"device": 7}, {"device": "x\nmethod: evil\n| <!-- end of results --> |"}]
)
def test_whatever_a_record_says_of_its_machine_stays_in_its_line(tmp_path: Path, environment: Any) -> None:
    _record(tmp_path, FEDU2, environment=environment)
    found = gather(tmp_path)
    assert "\nmethod" not in page(found)
    assert "<!--" not in page(found) + publish.headline(found)
    path = tmp_path / "recipe.yaml"
    path.write_text(publish.recipe(FEDU2, list(found[FEDU2][0])))
    assert resolve(Experiment.load(path)) == FEDU2.experiment(0)


def test_the_command_shows_the_page_or_writes_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _record(tmp_path / "results", FEDU2)
    assert main(["paper", "page", "--results", str(tmp_path / "results")]) == 0
    assert capsys.readouterr().out == _page(tmp_path / "results")
    out = tmp_path / "new" / "page.md"
    assert main(["paper", "page", "--results", str(tmp_path / "results"), "--out", str(out)]) == 0
    assert out.read_text() == _page(tmp_path / "results")
    assert main(["paper", "page", "--out", str(tmp_path)]) == 1
    assert "directory" in capsys.readouterr().err


# The README


def test_the_headline_joins_both_tables(tmp_path: Path) -> None:
    _record(tmp_path, FEDU2, 0)
    _record(tmp_path, FEDU2, 1, {"knn": 81.0, "linear": 80.5}, minutes=10)
    text = publish.headline(gather(tmp_path))
    (knn,), (linear, *_) = (plan.published()[name][HOME]["fedu2-byol"] for name in ("table2", "table1"))
    row = _row(text, "FedU²-BYOL")
    assert row[1:] == ["**80.50 ± 0.71**", f"{knn:.2f}", "**81.50 ± 1.41**", f"{linear:.2f}", "2", "15.0"]
    assert "on NVIDIA H200 (2 runs)" in text
    assert _row(text, "FedSimSiam")[1:4] == ["", "", ""]  # the paper has its linear probe alone
    titles = re.findall(r"^\| (\S.*?) \|", text, flags=re.M)[2:]
    for name in TABLES:  # each in its own order
        published = [rows.ROWS[row].title for row in plan.published()[name][HOME]]
        assert [title for title in titles if title in published] == published


def test_a_headline_without_records_is_a_sentence(tmp_path: Path) -> None:
    _record(tmp_path, plan.cell("cifar100-k10-a0.1", "fedbyol"))
    text = publish.headline(gather(tmp_path))
    assert text.startswith("There is no finished record of CIFAR-10, K = 10, α = 0.1 yet; ")
    assert text.count("\n") == 1
    assert "(docs/results.md)" in text


def test_pictures_are_described_by_their_numbers(tmp_path: Path) -> None:
    assert publish.pictures(tmp_path) == ""  # where nothing was drawn
    shown = [
        {
            "cell": f"{HOME}/{row}",
            "round": 50,
            "rounds": 100,
            "images": 2000,
            "effective_rank": {"global": rank, "local": [rank - 20, rank - 10]},
            "linear_cka_to_global": [alike, alike + 0.1],
        }
        for row, rank, alike in (("fedbyol", 200.0, 0.7), ("fedu2-byol", 300.0, 0.8))
    ]
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "pictures.json").write_text(json.dumps(shown))
    text = publish.pictures(tmp_path)
    assert "2000 test images in round 50 of 100," in text
    assert "200 and 185 (FedBYOL); 300 and 285 (FedU²-BYOL)" in text
    assert "0.75 (FedBYOL); 0.85 (FedU²-BYOL)" in text
    assert re.findall(r"\]\((.*?)\)", text) == [f"docs/pictures/{name}.png" for name in pictures.FIGURES]


@pytest.mark.parametrize("text", ["", publish.BEGIN, f"{publish.END} {publish.BEGIN}", f"{publish.BEGIN * 2}"])
def test_a_readme_without_its_markers_is_not_touched(text: str) -> None:
    with pytest.raises(UsageError, match="once each"):
        publish.with_block(text, "x")


def test_a_block_replaces_what_stood_there() -> None:
    once = publish.with_block(f"a\n{publish.BEGIN}old{publish.END}\nb", "new\n")
    assert once == f"a\n{publish.BEGIN}\n\nnew\n\n{publish.END}\nb"
    assert publish.with_block(once, "new\n") == once


# Recipes


@pytest.mark.parametrize("name", TABLES)
def test_a_recipe_is_exactly_its_cell(tmp_path: Path, name: str) -> None:
    path = tmp_path / "recipe.yaml"
    for cell in exhibits[name].cells:
        path.write_text(publish.recipe(cell, []))
        assert resolve(Experiment.load(path)) == cell.experiment(0), cell.name
        assert f"--cells {cell.name} --results runs/records data.root=PATH" in path.read_text()


def test_a_recipe_says_only_what_is_not_the_default() -> None:
    defaults = Experiment.parse({"dataset": "cifar10"}).flat()
    said = dict(leaves(yaml.safe_load(publish.body(plan.cell(HOME, "fedu2-byol-without-fur")))))
    assert said["fur.weight"] == 0
    assert {key for key in said if said[key] == defaults[key]} == {"method", "dataset"}


def test_a_recipe_tells_seeds_and_time(tmp_path: Path) -> None:
    _record(tmp_path, FEDU2, 2, minutes=20)
    _record(tmp_path, FEDU2, 10, minutes=30)
    (text,) = publish.recipes(gather(tmp_path)).values()
    as_it_was = "--seeds 2,10 --protocol-seeds 1 --results runs/records data.root=PATH"
    assert f"#     fedu2 paper run table1 --cells {FEDU2.name} {as_it_was}\n" in text
    assert f"#     fedu2 train --config recipes/{FEDU2.name}.yaml data.root=PATH\n" in text
    assert "25.0 minutes a run, on NVIDIA H200 (2 runs)." in text
    assert "not measured yet" in publish.recipe(FEDU2, [])


def test_a_recipe_trains_and_judges_as_its_record_was(tmp_path: Path) -> None:
    settings = {**FEDU2.experiment(0).flat(), "engine.lanes": 5}
    settings.pop("data.root")
    _record(tmp_path, FEDU2, scores={"linear": 85.0, "knn": 80.0}, experiment=settings)
    (text,) = publish.recipes(gather(tmp_path)).values()
    options = "--protocol knn --protocol linear --protocol-seeds 1 engine.lanes=5"
    assert f"--cells {FEDU2.name} {options} --results runs/records data.root=PATH\n" in text


# The checkout


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    (tmp_path / "README.md").write_text(f"# Mine\n\n{publish.BEGIN}\n{publish.END}\n")
    return tmp_path


def test_files_come_and_go_with_the_records(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    by_hand = checkout / "recipes" / "mine" / "own.yaml"
    by_hand.parent.mkdir(parents=True)
    by_hand.write_text("method: fedbyol\n")
    other = plan.cell("cifar100-k10-a0.5", "fedbyol")
    record = _record(checkout / "results" / "paper", other)
    publish.main(checkout)
    recipes = checkout / "recipes"
    always, own = recipes / HOME / "fedu2-byol.yaml", recipes / "cifar100-k10-a0.5" / "fedbyol.yaml"
    assert set(recipes.rglob("*.yaml")) == {by_hand, always, own}
    assert "CIFAR-100, K = 10, α = 0.5" in (checkout / "docs" / "results.md").read_text()
    capsys.readouterr()
    publish.main(checkout)
    assert capsys.readouterr().out == ""  # nothing to do
    record.unlink()
    publish.main(checkout)
    assert set(recipes.rglob("*.yaml")) == {by_hand, always}
    assert not own.parent.exists()
    assert "removed recipes/cifar100-k10-a0.5/fedbyol.yaml" in capsys.readouterr().out


def test_the_repository_shows_what_its_records_say() -> None:
    """If this fails: make results."""
    wanted = publish.rendered(ROOT)
    assert publish.stale(ROOT, wanted) == []
    for path, text in wanted.items():
        assert path.read_text(encoding="utf-8") == text, f"{path.relative_to(ROOT)} is out of date: make results"


@pytest.mark.parametrize(
    ("folder", "count"), [("first-recipe", 6), ("shared-target", 3), ("orchestra-without-norm", 1)]
)
def test_tables_of_records_that_count_no_more_say_what_those_say(folder: str, count: int) -> None:
    place = ROOT / "results" / folder
    text, paths = (place / "README.md").read_text(encoding="utf-8"), sorted(place.rglob("seed-*.json"))
    assert len(paths) == count
    for path in paths:
        record = read(path)
        setting, row = record.cell.split("/")
        scores = " | ".join("" if (s := record.score(name)) is None else f"{s:.2f}" for name in plan.PROTOCOLS)
        line = f"| {plan.setting_title(setting)} | {rows.ROWS[row].title} | {scores} | {record.seconds() / 60:.1f} |"
        assert line in text


def test_all_scores_of_the_tables_are_known() -> None:
    assert {protocol for name in TABLES for protocol in exhibits[name].protocols} == set(PROTOCOLS) == set(SCORES)


def test_what_a_record_says_of_its_machine_is_text_and_no_markup() -> None:
    record = Record(Path("seed-0.json"), {"environment": {"device": "cuda: [here](javascript:x) | *b* <i>"}})
    assert machines([record]) == [r"\[here\](javascript:x) \| \*b\* &lt;i&gt; (1 run)"]
