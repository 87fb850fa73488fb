"""Figures: drawn for every kind of run, the same every time, and without a trace in the run or in Matplotlib."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import matplotlib
import numpy as np
import pytest
import torch
from PIL import Image
from tools import pictures

import fedu2
from fedu2.cli import main
from fedu2.data import load_dataset
from fedu2.errors import DataError, TrainingError, UsageError
from fedu2.evaluation.collapse import effective_rank
from fedu2.evaluation.monitor import extract
from fedu2.evaluation.similarity import linear_cka
from fedu2.experiment import Experiment
from fedu2.federation.local import LocalBackend
from fedu2.methods import build
from fedu2.models.flat import FlatModel
from fedu2.paper import plan
from fedu2.report import snapshot as snapshots
from fedu2.report.draw import Drawing, drawings, save, svg
from fedu2.report.figures import ORDER, Point, eua, figures, sweep, tsne
from fedu2.report.figures.sphere import coverage, on_sphere
from fedu2.report.snapshot import FILE, Snapshot, evenly, snapshot
from fedu2.report.style import INK
from fedu2.report.subject import labels_of

MICRO = {
    "data.image_size": 16, "clients": 3, "encoder": "tiny", "width": 4, "rounds": 2, "local_steps": 2, "batch_size": 32,
    "evaluation.every": 1, "checkpoint_every": 1,
}  # fmt: skip
FROM_METRICS = ["curves", "agreement", "fur", "eua", "partition"]


@pytest.fixture(scope="module", autouse=True)
def _small_figures() -> Iterator[None]:
    """t-SNE takes its time with more."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(tsne, "IMAGES", 30)
        yield


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, fedu2.Run]:
    """FedU², FedBYOL, and one in which half of twelve clients take part; all with their snapshots."""
    root = tmp_path_factory.mktemp("runs")
    settings = {
        "fedu2": {"method": "fedu2"},
        "fedbyol": {"method": "fedbyol"},
        "partial": {"method": "fedu2", "clients": 12, "participation": 0.5},
    }
    trained = {name: fedu2.train(Experiment.parse(MICRO | extra), root / name) for name, extra in settings.items()}
    for run in trained.values():
        snapshot(run)
    return trained


@pytest.fixture
def run(runs: dict[str, fedu2.Run], tmp_path: Path) -> fedu2.Run:
    """A run to spoil."""
    shutil.copytree(runs["fedu2"].path, tmp_path / "run")
    return fedu2.Run(tmp_path / "run")


@pytest.fixture(scope="module")
def drawn(runs: dict[str, fedu2.Run]) -> dict[str, Drawing]:
    return drawings([runs["fedu2"]])


@pytest.fixture(scope="module")
def together(runs: dict[str, fedu2.Run]) -> dict[str, Drawing]:
    return drawings(list(runs.values()))


def _pictures(root: Path, count: int = 12) -> Path:
    """A folder of two sites without classes."""
    noise = np.random.default_rng(0)
    for site in ("north", "south"):
        (root / site).mkdir(parents=True)
        for number in range(count):
            pixels = noise.integers(0, 255, (16, 16, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(root / site / f"{number}.png")
    return root


def _ink(path: Path) -> float:
    """The share of a picture that is not white."""
    with Image.open(path) as picture:
        return float((np.asarray(picture.convert("RGB")) < 250).any(axis=2).mean())


def _digests(folder: Path) -> dict[str, str]:
    files = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != FILE]
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def test_a_run_has_all_figures_in_order(drawn: dict[str, Drawing]) -> None:
    assert list(drawn) == list(ORDER)
    assert set(ORDER) == set(figures)
    assert all(drawing.name == name for name, drawing in drawn.items())


@pytest.mark.parametrize("name", ORDER)
@pytest.mark.parametrize("which", ["drawn", "together"])
def test_figures_are_not_blank(name: str, which: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    drawing = request.getfixturevalue(which)[name]
    assert drawing.title
    assert drawing.caption.endswith(".")
    save(drawing, tmp_path / "figure.png", dpi=80)
    assert 0.02 < _ink(tmp_path / "figure.png") < 0.9
    assert drawing.figure.get_figwidth() == 6.7
    assert all(axes.has_data() for axes in drawing.figure.axes)


def test_the_same_runs_give_the_same_bytes(
    runs: dict[str, fedu2.Run], drawn: dict[str, Drawing], tmp_path: Path
) -> None:
    again = drawings([fedu2.Run(runs["fedu2"].path)])
    for name, drawing in drawn.items():
        assert svg(drawing) == svg(drawing) == svg(again[name]), name
    for number, drawing in enumerate((drawn["sphere"], again["sphere"])):
        save(drawing, tmp_path / f"{number}.png")
    assert (tmp_path / "0.png").read_bytes() == (tmp_path / "1.png").read_bytes()


def test_svg_stands_in_a_page_beside_others(drawn: dict[str, Drawing]) -> None:
    elements = {name: svg(drawing) for name, drawing in drawn.items()}
    everything: list[str] = []
    for name, element in elements.items():
        ET.fromstring(element)
        assert element.startswith("<svg ")
        assert element.rstrip().endswith("</svg>")
        assert "currentColor" in element
        assert INK not in element
        assert "<metadata>" not in element
        ids = re.findall(r' id="([^"]+)"', element)
        assert all(found.startswith(f"{name}-") for found in ids)
        assert {*re.findall(r'href="#([^"]+)"', element), *re.findall(r"url\(#([^)]+)\)", element)} <= set(ids)
        everything += ids
    assert len(everything) == len(set(everything))
    assert "#123456" in svg(drawn["fur"], ink="#123456")


def test_files_are_white_and_other_kinds_are_refused(drawn: dict[str, Drawing], tmp_path: Path) -> None:
    save(drawn["fur"], tmp_path / "fur.svg")
    text = (tmp_path / "fur.svg").read_text()
    assert text.startswith("<?xml")
    assert "currentColor" not in text
    assert "#ffffff" in text
    with pytest.raises(UsageError, match=r"\.png or \.svg"):
        save(drawn["fur"], tmp_path / "fur.pdf")
    assert [path.name for path in tmp_path.iterdir()] == ["fur.svg"]


def test_matplotlib_is_left_as_it_was(runs: dict[str, fedu2.Run]) -> None:
    before = dict(matplotlib.rcParams)
    svg(drawings([runs["fedu2"]], ["curves"])["curves"])
    assert dict(matplotlib.rcParams) == before
    with matplotlib.rc_context({"font.size": 20, "lines.linewidth": 9, "svg.fonttype": "none"}):
        own = svg(drawings([runs["fedu2"]], ["curves"])["curves"])
    assert own == svg(drawings([runs["fedu2"]], ["curves"])["curves"])
    code = "import sys, fedu2.report.draw; sys.exit('matplotlib.pyplot' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_several_runs_share_a_figure(runs: dict[str, fedu2.Run], together: dict[str, Drawing]) -> None:
    assert list(together) == list(ORDER)
    shown = {axes.get_title(loc="left"): axes for axes in together["curves"].figure.axes}
    assert len(shown["kNN accuracy (%)"].lines) == 3
    assert len(shown["uniformity loss $\\ell_u$ (FUR)"].lines) == 2  # FedBYOL has no FUR
    knn = shown["kNN accuracy (%)"].lines[1]
    assert list(knn.get_ydata()) == [record["knn"] for record in runs["fedbyol"].history]
    assert len(together["sphere"].figure.axes) == 3 + 1  # and the reference
    assert len(together["tsne"].figure.axes) == 3
    spectra = together["spectrum"].figure.axes
    assert [len(axes.lines) for axes in spectra] == [4, 4]  # and the Gaussian reference
    maps = [axes for axes in together["partition"].figure.axes if axes.images]
    assert [axes.images[0].get_array().shape for axes in maps] == [(10, 3), (10, 12)]  # two runs share theirs


def test_the_spectrum_is_that_of_the_global_model(runs: dict[str, fedu2.Run], drawn: dict[str, Drawing]) -> None:
    run = runs["fedu2"]
    test = load_dataset("sample", run.experiment.data).test
    features = extract(run.encoder(), test.images).double()
    z = (features / features.norm(dim=1, keepdim=True)).numpy()
    brute = np.linalg.svd(np.cov(z, rowvar=False, bias=True), compute_uv=False)
    line = drawn["spectrum"].figure.axes[0].lines[0].get_ydata()
    assert len(line) == min(100, features.shape[1])
    kept = np.isfinite(line)
    assert kept[0]
    assert np.allclose(line[kept], np.log10(brute[: len(line)][kept]), atol=1e-3)


def test_weights_stand_where_clients_took_part(runs: dict[str, fedu2.Run]) -> None:
    run = runs["partial"]
    matrix = eua.over_rounds(run, "eua.weights")
    assert matrix.shape == (12, 2)
    for record in run.history[1:]:
        column = matrix[:, record["round"] - 1]
        assert np.flatnonzero(np.isfinite(column)).tolist() == record["clients"]
        assert column[record["clients"]].tolist() == record["eua.weights"]


def test_the_partition_is_counted(runs: dict[str, fedu2.Run], drawn: dict[str, Drawing]) -> None:
    shares = json.loads((runs["fedu2"].path / "partition.json").read_text())["clients"]
    labels = load_dataset("sample", runs["fedu2"].experiment.data).train.labels.tolist()
    bars, heat_map = drawn["partition"].figure.axes[:2]
    assert [bar.get_height() for bar in bars.patches] == [len(share) for share in shares]
    counts = heat_map.images[0].get_array().filled(0)
    assert counts[3, 1] == sum(labels[index] == 3 for index in shares[1])
    assert "airplane" in [text.get_text() for text in heat_map.get_yticklabels()]


def test_a_run_without_eua_and_fur(runs: dict[str, fedu2.Run]) -> None:
    assert set(ORDER) - set(drawings([runs["fedbyol"]])) == {"eua", "fur"}
    with pytest.raises(UsageError, match=r"nothing in .* for the figure 'eua'"):
        drawings([runs["fedbyol"]], ["eua"])


def test_an_unfinished_run(run: fedu2.Run) -> None:
    (run.path / "summary.json").unlink()
    lines = (run.path / "metrics.jsonl").read_text().splitlines()
    (run.path / "metrics.jsonl").write_text("\n".join([*lines[:2], lines[2][:40]]))  # cut off by a crash
    assert list(drawings([run])) == list(ORDER)


def test_a_run_that_has_only_begun(run: fedu2.Run, caplog: pytest.LogCaptureFixture) -> None:
    first = (run.path / "metrics.jsonl").read_text().splitlines()[0]
    (run.path / "metrics.jsonl").write_text(first + "\n")
    (run.path / FILE).unlink()
    shutil.rmtree(run.path / "checkpoint")
    assert list(drawings([run])) == ["curves", "partition"]
    assert caplog.text.count("has no checkpoint yet") == 1
    for name in ("spectrum", "sphere", "tsne", "agreement"):
        with pytest.raises(TrainingError, match="has no checkpoint yet"):
            drawings([run], [name])


def test_one_of_several_runs_without_checkpoint(
    run: fedu2.Run, runs: dict[str, fedu2.Run], caplog: pytest.LogCaptureFixture
) -> None:
    shutil.rmtree(run.path / "checkpoint")
    both = drawings([run, runs["fedbyol"]], ["spectrum", "agreement"])
    assert len(both["spectrum"].figure.axes[0].lines) == 1 + 1
    assert len(both["agreement"].figure.axes[0].lines) == 2
    assert caplog.text.count("no representations of FedU²-BYOL") == 1


def test_images_without_labels_and_images_that_are_gone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    settings = {"dataset": "folder", "data.root": str(_pictures(tmp_path / "sites")), "partition": "folders"}
    run = fedu2.train(Experiment.parse(MICRO | settings | {"batch_size": 8, "data.holdout": 0.0}), tmp_path / "run")
    unlabelled = drawings([run])
    assert list(unlabelled) == list(ORDER)
    assert [len(axes.patches) for axes in unlabelled["partition"].figure.axes] == [2]  # bars alone
    assert "training images" in unlabelled["spectrum"].caption
    shutil.rmtree(tmp_path / "sites")
    assert list(drawings([run])) == list(ORDER)  # from what was kept
    (run.path / FILE).unlink()
    assert list(drawings([run])) == FROM_METRICS
    assert "no representations of" in caplog.text
    with pytest.raises(DataError):
        drawings([run], ["tsne"])


def test_other_images_than_those_of_the_run_are_refused(run: fedu2.Run) -> None:
    (run.path / "images.blake2b").write_text("0" * 32)
    (run.path / FILE).unlink()
    with pytest.raises(UsageError, match="are not those that the run"):
        snapshot(run)


def test_a_snapshot_leaves_the_run_alone_and_is_kept(run: fedu2.Run, monkeypatch: pytest.MonkeyPatch) -> None:
    (run.path / FILE).unlink()
    before = _digests(run.path)
    first = snapshot(run)
    assert _digests(run.path) == before
    assert (first.round, first.clients) == (2, (0, 1, 2))
    assert first.features.shape == (1000, first.local.shape[2])
    assert first.local.shape[:2] == (3, 1000)

    def refuse(*_: object) -> None:
        raise AssertionError("it was kept")

    with monkeypatch.context() as patched:
        patched.setattr(snapshots, "_take", refuse)
        second = snapshot(run)
    assert torch.equal(first.local, second.local)
    assert torch.equal(first.labels, second.labels)
    assert (first.classes, first.tested) == (second.classes, second.tested)
    (run.path / FILE).write_bytes(b"damaged")
    assert torch.equal(snapshot(run).features, first.features)


@pytest.mark.parametrize("lr", [1.0, 2.0])
def test_local_models_are_those_of_the_next_round(micro: Experiment, tmp_path: Path, lr: float) -> None:
    """What a run that goes on really trains, client by client, from what it is sent."""
    run = fedu2.train(micro.with_(rounds=2, server__lr=lr), tmp_path / "run")
    taken = snapshot(run)
    replies = {}

    class Listening(LocalBackend):
        def run(self, *arguments: object):  # type: ignore[no-untyped-def]
            for reply in super().run(*arguments):  # type: ignore[arg-type]
                replies[reply.client] = reply.model
                yield reply

    longer = fedu2.train(run.experiment.with_(rounds=3), run.path, resume=True, backend=Listening)
    test = load_dataset("sample", run.experiment.data).test
    model = FlatModel(build(run.experiment).learner())
    for row, client in enumerate(taken.clients):
        model.load(replies[client])
        assert torch.equal(extract(model.module.encoder, test.images), taken.local[row])
    assert snapshot(fedu2.Run(longer.path)).round == 3  # made anew


def test_a_snapshot_takes_the_largest_clients_of_the_round(monkeypatch: pytest.MonkeyPatch, micro: Experiment) -> None:
    monkeypatch.setattr(snapshots, "MOST_CLIENTS", 2)
    tasks = snapshots._tasks(micro.with_(rounds=5), [40, 70, 50], round_=6)
    assert [(task.client, task.round, task.progress) for task in tasks] == [(1, 6, 0.8), (2, 6, 0.8)]


def test_images_are_chosen_in_proportion() -> None:
    labels = torch.tensor([0] * 60 + [1] * 30 + [2] * 10)[torch.randperm(100, generator=torch.manual_seed(0))]
    chosen = evenly(100, 20, labels)
    assert torch.equal(chosen, evenly(100, 20, labels))
    assert len(chosen.unique()) == 20
    assert all(abs(a - b) <= 1 for a, b in zip(labels[chosen].bincount().tolist(), (12, 6, 2), strict=True))
    assert torch.equal(evenly(5, 20), torch.arange(5))


def test_coverage_of_the_sphere() -> None:
    noise = torch.randn(20_000, 3, generator=torch.manual_seed(0), dtype=torch.float64)
    uniform = (noise / noise.norm(dim=1, keepdim=True)).numpy()
    assert coverage(uniform) == 1
    assert coverage(uniform[:1]) == 1 / 288
    half = uniform[uniform[:, 1] > 0]
    assert coverage(half) == pytest.approx(0.5, abs=0.01)
    poles = np.array([[1.0, 0, 0], [-1.0, 0, 0], [0, 0, 1.0], [0, 1.0, -1e-300]])
    assert 3 / 288 <= coverage(poles) <= 4 / 288


def test_collapsed_features_leave_the_sphere_blank() -> None:
    noise = torch.randn(1000, 16, generator=torch.manual_seed(0))
    spread, collapsed = coverage(on_sphere(noise)), coverage(on_sphere(noise * torch.tensor([1.0] + 15 * [0.02])))
    assert np.allclose(np.linalg.norm(on_sphere(noise), axis=1), 1)
    assert spread > 0.9
    assert collapsed < 0.5
    assert on_sphere(noise[:, :2]).shape == (1000, 3)


def test_many_classes_show_the_first_ten(runs: dict[str, fedu2.Run], monkeypatch: pytest.MonkeyPatch) -> None:
    few = snapshot(runs["fedu2"])
    many = Snapshot(2, few.clients, few.features, few.local, torch.arange(1000) % 100, (), True)
    monkeypatch.setattr("fedu2.report.subject.snapshot", lambda *_: many)
    drawing = drawings([runs["fedu2"]], ["tsne"])["tsne"]
    assert "the first ten" in drawing.caption
    names = [text.get_text() for text in drawing.figure.legends[0].get_texts()]
    assert names == ["global model", "local models", *map(str, range(10))]


def test_a_collapsed_encoder_is_drawn(runs: dict[str, fedu2.Run], monkeypatch: pytest.MonkeyPatch) -> None:
    kept = snapshot(runs["fedu2"])
    collapsed = replace(kept, features=torch.zeros_like(kept.features), local=torch.zeros_like(kept.local))
    monkeypatch.setattr("fedu2.report.subject.snapshot", lambda *_: collapsed)
    drawn = drawings([runs["fedu2"]], ["spectrum", "sphere", "tsne", "agreement"])
    assert "covers 0 %" in [axes.get_xlabel() for axes in drawn["sphere"].figure.axes]
    assert all(svg(drawing) for drawing in drawn.values())


def test_runs_are_told_apart(runs: dict[str, fedu2.Run], tmp_path: Path) -> None:
    first = runs["fedu2"]
    assert labels_of([first, runs["fedbyol"]]) == ["FedU²-BYOL", "FedBYOL"]
    keys = labels_of([first, runs["partial"]])
    assert keys == ["FedU²-BYOL, clients=3, participation=1.0", "FedU²-BYOL, clients=12, participation=0.5"]
    shutil.copytree(first.path, tmp_path / "copy")
    assert labels_of([first, fedu2.Run(tmp_path / "copy")]) == ["FedU²-BYOL (fedu2)", "FedU²-BYOL (copy)"]


def test_a_sweep_has_a_place_for_0_and_none_for_what_is_missing() -> None:
    line = [Point(0, 80.0, 0.5, 3), Point(0.01, 81.0, 0.4, 2), Point(0.5, 79.0)]
    figure = sweep({"FedU²-BYOL": line, "FedU²-SimSiam": [Point(0.1, 78.0, 0.2, 3)]}, "weight")
    (axes,) = figure.axes
    assert [text.get_text() for text in axes.get_xticklabels()] == ["0", "0.01", "0.1", "0.5"]
    drawn = axes.containers[0].lines[0].get_ydata()
    assert np.array_equal(np.array(drawn, float), [80.0, 81.0, np.nan, 79.0], equal_nan=True)
    assert [text.get_text() for text in figure.legends[0].get_texts()] == [
        "FedU²-BYOL (1 to 3 seeds)",
        "FedU²-SimSiam (3 seeds)",
    ]
    with pytest.raises(ValueError, match="no points"):
        sweep({"FedU²-BYOL": []}, "weight")


def test_the_command_writes_files(run: fedu2.Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["figures", str(run.path), "--figure", "curves", "--figure", "fur"]) == 0
    assert "curves, fur (.png .svg) → " in capsys.readouterr().out
    written = sorted(path.name for path in (run.path / "figures").iterdir())
    assert written == ["curves.png", "curves.svg", "fur.png", "fur.svg"]
    with Image.open(run.path / "figures" / "curves.png") as picture:
        assert picture.width == 1340


def test_the_command_compares_runs(runs: dict[str, fedu2.Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    paths = [str(runs[name].path) for name in ("fedu2", "fedbyol")]
    assert main(["figures", *paths, "--figure", "fur"]) == 0
    assert (tmp_path / "figures" / "fur.svg").exists()
    assert main(["figures", *paths, "--figure", "fur", "--out", "elsewhere"]) == 0
    assert (tmp_path / "elsewhere" / "fur.png").exists()


@pytest.mark.parametrize(
    ("arguments", "code", "sentence"),
    [
        (["--figure", "spectra"], 2, "unknown figure 'spectra': known are agreement, curves"),
        (["--device", "quantum", "--figure", "tsne"], 2, "quantum"),
        (["--out", "FILE"], 2, "is no folder"),
    ],
)
def test_bad_input_is_one_sentence(
    run: fedu2.Run, capsys: pytest.CaptureFixture[str], arguments: list[str], code: int, sentence: str
) -> None:
    (run.path / FILE).unlink()
    arguments = [word.replace("FILE", str(run.path / "config.yaml")) for word in arguments]
    assert main(["figures", str(run.path), *arguments]) == code
    assert sentence in capsys.readouterr().err
    assert not (run.path / "figures").exists()


def test_what_is_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["figures", str(tmp_path)]) == 2
    assert "holds no run" in capsys.readouterr().err


def test_a_run_may_begin_where_figures_lie(micro: Experiment, tmp_path: Path) -> None:
    """What other commands made of a run that did not get far is no stranger in its directory."""
    (tmp_path / "run" / "figures").mkdir(parents=True)
    for name in (FILE, "report.html"):
        (tmp_path / "run" / name).touch()
    assert fedu2.train(micro.with_(rounds=1), tmp_path / "run").summary["rounds"] == 1


def test_the_gallery_shows_every_figure() -> None:
    docs = Path(__file__).parents[1] / "docs"
    text = (docs / "figures.md").read_text()
    shown = re.findall(r"^!\[[^]]+\]\((figures/.+?\.png)\)$", text, flags=re.M)
    assert {f"figures/{name}.png" for name in ORDER} <= set(shown)
    assert sorted(docs.glob("figures/*")) == sorted(docs / name for name in shown)
    assert all((docs / name).stat().st_size <= 100_000 for name in shown)
    assert re.findall(r"^## ([a-z]+)$", text, flags=re.M) == list(ORDER)


def test_the_figure_in_the_guide_is_drawn(runs: dict[str, fedu2.Run], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(figures, "_parts", dict(figures._parts))
    guide = (Path(__file__).parents[1] / "docs" / "figures.md").read_text()
    (block,) = re.findall(r"```python\n(.*?)```", guide, flags=re.S)
    exec(compile(block, "figures.md", "exec"), {"__name__": __name__})
    (axes,) = drawings([runs["fedu2"], runs["fedbyol"]], ["speed"])["speed"].figure.axes
    assert len(axes.lines) == 2
    with pytest.raises(ValueError, match="built in"):
        figures.register("curves")(lambda subjects: None)


@pytest.mark.parametrize(
    "line",
    [
        {"round": "4", "loss": 2},
        {"round": -5, "clients": [0, 1, 2], "eua.weights": [1, 1, 1], "eua.rates": [1, 1, 1]},
        {"round": 3, "clients": [0, 1, 99], "eua.weights": [1, 1, 1], "eua.rates": [1, 1, 1]},
        {"round": 3, "clients": [0, 1, 2], "eua.weights": [1, 1], "eua.rates": [1]},
        {"round": 3, "eua.weights": [1, 1, 1]},
        {"round": 3, "clients": "all", "eua.weights": None},
    ],
)
def test_damaged_lines_are_passed_over(run: fedu2.Run, line: dict) -> None:
    with (run.path / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")
    assert set(drawings([run], ["curves", "eua"])) == {"curves", "eua"}


def test_names_are_shown_as_they_are(
    runs: dict[str, fedu2.Run], tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    names = ["$^{_}$ %s {0}", "x" * 200, "病院"]
    drawn = drawings([runs["fedu2"]] * 3, ["curves"], labels=names)["curves"]
    save(drawn, tmp_path / "curves.png")
    (words,) = [legend.get_texts() for legend in drawn.figure.legends]
    shown = [text.get_text() for text in words]
    assert shown[0] == r"\$^{_}\$ %s {0}"
    assert len(shown[1]) < 40
    assert not [warning for warning in recwarn if "Glyph" in str(warning.message)]


def test_runs_of_one_directory_name_are_told_apart(runs: dict[str, fedu2.Run], tmp_path: Path) -> None:
    for place in ("one", "two"):
        shutil.copytree(runs["fedu2"].path, tmp_path / place / "a")
    assert labels_of([fedu2.Run(tmp_path / place / "a") for place in ("one", "two")]) == [
        "FedU²-BYOL (one/a)",
        "FedU²-BYOL (two/a)",
    ]


def test_the_numbers_of_a_picture_are_those_of_its_snapshot(runs: dict[str, fedu2.Run]) -> None:
    run = runs["partial"]
    taken = snapshot(run)
    found = pictures.numbers(plan.cell(plan.HOME, "fedu2-byol"), run, "0123")
    assert found["commit"] == "0123"
    assert found["round"] == found["rounds"] == run.experiment.rounds
    assert found["clients"] == list(taken.clients)
    assert found["effective_rank"]["global"] == pytest.approx(effective_rank(taken.features), rel=1e-3)
    assert len(found["effective_rank"]["local"]) == len(found["spectrum"]["local"]) == len(taken.clients) == 6
    alike = [linear_cka(taken.features, local) for local in taken.local]
    assert found["linear_cka_to_global"] == pytest.approx(alike, rel=1e-3)
    values = found["spectrum"]["global"]
    assert values == sorted(values, reverse=True)
    assert len(values) == min(pictures.TOP, taken.features.shape[1])
