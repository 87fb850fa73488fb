"""`fedu2 export`: the network that others load is the one that was trained, and nothing private goes along."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors import safe_open
from torch import nn

import fedu2
from fedu2.cli import main
from fedu2.data.decode import decode_image
from fedu2.errors import TrainingError, UsageError
from fedu2.evaluation.monitor import extract
from fedu2.experiment import Experiment
from fedu2.export import export, formats, package
from fedu2.export.network import network_of
from fedu2.export.standalone import ARCHITECTURES
from fedu2.models import build_encoder, encoders
from fedu2.models.norm import Norm
from fedu2.views import normalize

DOCUMENT = Path(__file__).parents[1] / "docs" / "take-home.md"
ALL = ("safetensors", "onnx", "pt2")
FILES = {"safetensors": "encoder.safetensors", "onnx": "encoder.onnx", "pt2": "encoder.pt2"}
VALUES = {
    "clients": 2, "partition": "iid", "encoder": "tiny", "width": 4, "rounds": 2, "local_steps": 2, "batch_size": 32,
    "evaluation.every": 1,
}  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> fedu2.Run:
    return fedu2.train(Experiment.parse(VALUES), tmp_path_factory.mktemp("runs") / "secretive-name")


@pytest.fixture(scope="module")
def exported(run: fedu2.Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export(run, tmp_path_factory.mktemp("away") / "encoder", ALL)


def _snippets(text: str) -> dict[str, str]:
    """Of each format the code by which a page loads it, after that which makes an image."""
    blocks = re.findall(r"```python\n(.*?)```", text, flags=re.S)
    prepare = next(block for block in blocks if "ImageOps.fit" in block)
    marks = {"safetensors": "from encoder import load", "onnx": '"encoder.onnx"', "pt2": '"encoder.pt2"'}
    return {
        name: prepare + block for name, mark in marks.items() for block in blocks if mark in block and block != prepare
    }


STRANGER = """
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "fedu2":
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Refuse())
try:
    import fedu2
    sys.exit("fedu2 is there after all")
except ModuleNotFoundError:
    pass
sys.path.insert(0, "")
sys.dont_write_bytecode = True
"""


def test_the_card_shows_what_the_document_shows(exported: Path) -> None:
    assert _snippets((exported / "README.md").read_text()) == _snippets(DOCUMENT.read_text())
    assert set(_snippets(DOCUMENT.read_text())) == set(ALL)


@pytest.mark.parametrize("name", ALL)
def test_what_the_document_shows_works_without_fedu2(run: fedu2.Run, exported: Path, tmp_path: Path, name: str) -> None:
    folder = shutil.copytree(exported, tmp_path / "copy")
    pixels = np.random.default_rng(0).integers(0, 256, (50, 70, 3), np.uint8)
    Image.fromarray(pixels).save(folder / "picture.png")
    script = STRANGER + _snippets(DOCUMENT.read_text())[name] + "np.save('features.npy', np.asarray(features))\n"
    subprocess.run([sys.executable, "-I", "-c", script], cwd=folder, check=True, timeout=300)
    image = torch.from_numpy(decode_image(folder / "picture.png", 32))[None]
    expected = extract(run.encoder(), image).numpy()
    assert np.abs(np.load(folder / "features.npy") - expected).max() < 1e-5
    assert expected.std() > 0.01


@pytest.mark.parametrize("name", ALL)
def test_any_number_of_images(run: fedu2.Run, exported: Path, name: str) -> None:
    network = formats[name].load(exported)
    for count in (1, 2, 5):
        images = torch.rand(count, 3, 32, 32)
        with torch.no_grad():
            expected = run.encoder()(normalize(images))
            assert torch.allclose(network(images), expected, atol=1e-5)


@pytest.mark.parametrize("width", [None, 3])
@pytest.mark.parametrize("name", list(ARCHITECTURES))
def test_the_definition_is_that_of_the_package(name: str, width: int | None) -> None:
    width = 6 if width is None and name != "tiny" else width  # their own widths are too large for a quick test
    encoder = build_encoder(name, width).eval()
    for norm in (module for module in encoder.modules() if isinstance(module, Norm)):  # as if it were trained
        for values, least, most in ((norm.weight, 0.8, 1.2), (norm.bias, 0, 0.4), (norm.running_var, 0.5, 1.5)):
            nn.init.uniform_(values, least, most)
        nn.init.normal_(norm.running_mean, std=0.2)
    network = network_of(encoder, Experiment.parse({"encoder": name, "width": width}))
    images = torch.rand(2, 3, 32, 32)
    with torch.no_grad():
        expected = encoder(normalize(images))
        difference = (network.module(images) - expected).abs().max()
    assert expected.std() > 0.01
    assert difference <= 1e-5 * expected.abs().max()
    assert network.module.features == encoder.features == expected.shape[1]


def test_all_built_in_encoders_are_defined() -> None:
    assert set(ARCHITECTURES) <= set(encoders)
    assert {"tiny", "resnet10", "resnet18", "resnet34", "resnet50"} == set(ARCHITECTURES)


def test_weights_keep_their_names(run: fedu2.Run, exported: Path) -> None:
    state = run.encoder().state_dict()
    with safe_open(exported / "encoder.safetensors", framework="pt") as file:
        assert set(file.keys()) == set(state)
        assert all(torch.equal(file.get_tensor(name), state[name]) for name in state)
        assert file.metadata()["round"] == "2"


def test_the_card_tells_figures_and_nothing_private(run: fedu2.Run, exported: Path) -> None:
    card = (exported / "README.md").read_text()
    assert "# FedU² encoder: tiny, 16 features" in card
    assert f"| accuracy in %, kNN while training | {run.history[-1]['knn']:.4g} | {run.history[0]['knn']:.4g} |" in card
    assert "| rounds | 2 of 2 |" in card
    assert "| clients | 2, partition iid |" in card
    for words in ("## Licence", "## Citation", "liao2024", "Intended use"):
        assert words in card
    private = [str(run.path), run.path.name, str(exported.parent), str(Path(fedu2.__file__).parent), str(Path.home())]
    for file in exported.iterdir():
        for content in _contents(file):
            assert not [words for words in private if words.encode() in content], file.name


def _contents(file: Path) -> Iterator[bytes]:
    yield file.read_bytes()
    if zipfile.is_zipfile(file):
        with zipfile.ZipFile(file) as archive:
            yield from (archive.read(name) for name in archive.namelist())


def test_onnx_says_what_it_is(exported: Path) -> None:
    onnx = pytest.importorskip("onnx")
    model = onnx.load(exported / "encoder.onnx")
    onnx.checker.check_model(model, full_check=True)
    facts = {entry.key: entry.value for entry in model.metadata_props}
    assert (facts["method"], facts["round"], facts["features"]) == ("fedu2", "2", "16")
    assert not [node.name for node in model.graph.node if node.metadata_props]
    assert model.graph.input[0].type.tensor_type.shape.dim[0].dim_param
    assert sorted(path.name for path in exported.glob("encoder.onnx*")) == ["encoder.onnx"]


def test_what_was_judged_is_on_the_card(run: fedu2.Run, tmp_path: Path) -> None:
    shutil.copytree(run.path, tmp_path / "run")
    judged = {"seeds": 2, "options": {}, "round": 2, "encoder": "last", "deviation": 1.25, "values": [40.0, 42.5]}
    entries = [
        {**judged, "protocol": "linear", "data": "sample", "mean": 41.25},
        {**judged, "protocol": "linear", "data": "/home/somebody/ward", "mean": 55.5},
        {**judged, "protocol": "linear", "data": "sample", "mean": 30.5, "encoder": "untrained", "round": 0},
        {**judged, "protocol": "knn", "data": "sample", "mean": 77.7, "round": 1},
        {**judged, "protocol": "supervised 1 %", "data": "sample", "mean": 88.8},
    ]
    (tmp_path / "run" / "evaluation.json").write_text(json.dumps(entries))
    card = (export(fedu2.Run(tmp_path / "run")) / "README.md").read_text()
    assert "| accuracy in %, linear | 41.2 ± 1.2 | 30.5 ± 1.2 |" in card
    assert "| accuracy in %, linear, on other labelled images | 55.5 ± 1.2 | – |" in card
    assert "somebody" not in card
    assert "77.7" not in card  # of another round
    assert "88.8" not in card  # of a network that was trained with labels alone


def test_other_methods_are_cited_by_name(run: fedu2.Run, exported: Path) -> None:
    facts = json.loads((exported / "config.json").read_text())
    other = fedu2.Run(run.path)
    other.__dict__["experiment"] = run.experiment.with_(method="fedsimclr", objective="simclr", aggregator="fedavg")
    card = package.model_card(other, facts, {})
    assert "FedSimCLR" in card
    assert "Chen et al., ICML 2020" in card
    assert "liao2024" in card


def test_the_best_round(run: fedu2.Run, tmp_path: Path) -> None:
    folder = export(run, tmp_path / "best", best=True)
    assert json.loads((folder / "config.json").read_text())["round"] == run.best_round
    assert "the best by kNN" in (folder / "README.md").read_text()
    images = torch.rand(2, 3, 32, 32)
    with torch.no_grad():
        expected = run.encoder(best=True)(normalize(images))
        assert torch.allclose(formats["safetensors"].load(folder)(images), expected, atol=1e-5)


def test_a_difference_is_an_error_and_leaves_nothing(
    run: fedu2.Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        type(formats["safetensors"]), "load", lambda self, folder: lambda images: torch.ones(len(images), 16)
    )
    with pytest.raises(TrainingError, match="written as safetensors differs from the trained one by"):
        export(run, tmp_path / "new" / "encoder")
    assert not list(tmp_path.iterdir())


def test_features_that_are_not_finite_are_an_error(
    run: fedu2.Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(package, "extract", lambda encoder, images: torch.full((len(images), 16), torch.nan))
    with pytest.raises(TrainingError, match="not finite"):
        export(run, tmp_path / "encoder")
    assert not list(tmp_path.iterdir())


def test_an_earlier_export_is_replaced_when_asked_for(run: fedu2.Run, tmp_path: Path) -> None:
    folder = export(run, tmp_path / "encoder")
    (folder / "encoder.py").write_text("broken")
    with pytest.raises(UsageError, match="--force replaces it"):
        export(run, folder)
    assert (folder / "encoder.py").read_text() == "broken"
    export(run, folder, force=True)
    assert "class Encoder" in (folder / "encoder.py").read_text()
    assert [path.name for path in tmp_path.iterdir()] == ["encoder"]


@pytest.mark.parametrize("content", ["thesis.tex", "config.json"])
def test_a_folder_of_something_else_is_left_alone(run: fedu2.Run, tmp_path: Path, content: str) -> None:
    (tmp_path / content).write_text("[]")
    with pytest.raises(UsageError, match="not empty and holds no export"):
        export(run, tmp_path, force=True)
    assert [path.name for path in tmp_path.iterdir()] == [content]


def test_images_that_are_gone_are_replaced_by_the_sample(run: fedu2.Run, tmp_path: Path) -> None:
    away = run.experiment.with_(dataset="folder", data__root=str(tmp_path / "gone"), data__image_size=16)
    images = package._real_images(away)
    assert images.shape == (32, 3, 16, 16)
    assert images.float().std() > 10


def test_an_encoder_of_ones_own(micro: Experiment, tmp_path: Path) -> None:
    @encoders.register("exported")
    def mine(width: int | None) -> nn.Module:
        net = nn.Sequential(nn.Conv2d(3, 8, 4, 4), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
        net.features = 8
        return net

    own = fedu2.train(micro.with_(encoder="exported", rounds=1), tmp_path / "run")
    with pytest.raises(UsageError, match="choose the format onnx or pt2"):
        export(own, tmp_path / "refused")
    folder = export(own, tmp_path / "encoder", ["pt2", "onnx"])
    images = torch.rand(3, 3, 16, 16)
    with torch.no_grad():
        expected = own.encoder()(normalize(images))
    for name in ("pt2", "onnx"):
        assert torch.allclose(formats[name].load(folder)(images), expected, atol=1e-5)
    assert {path.name for path in folder.iterdir()} == {"encoder.pt2", "encoder.onnx", "config.json", "README.md"}


def test_the_command_is_quiet_and_lists_files(
    run: fedu2.Run, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", str(run.path), "--format", "onnx", "--out", str(tmp_path / "out")]) == 0
    shown = capfd.readouterr()
    assert shown.err == ""
    assert [line.split()[0] for line in shown.out.splitlines()] == [
        "Written", "README.md", "config.json", "encoder.onnx", "README.md",
    ]  # fmt: skip


def test_what_cannot_be_exported(
    run: fedu2.Run, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(code: int, sentence: str, *arguments: str) -> None:
        assert main(["export", *arguments, "--out", str(tmp_path / "out")]) == code
        assert sentence in capsys.readouterr().err

    fails(2, "holds no run", str(tmp_path / "nothing"))
    fails(
        2,
        "unknown format 'onx': known are onnx, pt2, safetensors; did you mean 'onnx'?",
        str(run.path),
        "--format",
        "onx",
    )
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    fails(2, "format onnx needs onnxscript: pip install 'fedu2[onnx]'", str(run.path), "--format", "onnx")
    shutil.copytree(run.path, tmp_path / "begun", ignore=shutil.ignore_patterns("checkpoint"))
    fails(1, "has no checkpoint yet", str(tmp_path / "begun"))
    (tmp_path / "file").write_text("")
    assert main(["export", str(run.path), "--out", str(tmp_path / "file")]) == 2
    assert "is no directory" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["begun", "file"]


def test_files_of_the_users_own_are_never_replaced(run: fedu2.Run, tmp_path: Path) -> None:
    folder = export(run, tmp_path / "out")
    (folder / "notes.txt").write_text("mine")
    with pytest.raises(UsageError, match=r"holds more than an export \(notes\.txt\)"):
        export(run, folder, force=True)
    assert (folder / "notes.txt").read_text() == "mine"


def test_an_export_into_the_current_folder(run: fedu2.Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    path = run.path.absolute()
    monkeypatch.chdir(tmp_path / "here")
    folder = export(fedu2.Run(path), ".")
    assert (folder / "encoder.safetensors").exists()
    monkeypatch.chdir(tmp_path)


def test_of_two_exports_at_once_the_second_is_refused(
    run: fedu2.Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def quicker(*arguments: object) -> str:
        monkeypatch.setattr("fedu2.export.package.model_card", lambda *_: "second")
        export(run, tmp_path / "out")
        return "first"

    monkeypatch.setattr("fedu2.export.package.model_card", quicker)
    with pytest.raises(UsageError, match="holds an export already"):
        export(run, tmp_path / "out")
    assert (tmp_path / "out" / "README.md").read_text() == "second"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
