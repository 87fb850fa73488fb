"""`fedu2 flower`: the app that is written, keys, and that the core does without Flower."""

from __future__ import annotations

import shlex
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from fedu2.cli import main

pytest.importorskip("flwr")

from fedu2.errors import UsageError
from fedu2.experiment import Experiment
from fedu2.federation.flower.command import _app, _for_sites
from fedu2.federation.flower.init import experiment_of
from fedu2.methods import resolve


def test_the_core_never_imports_flower() -> None:
    script = (
        "import sys; sys.modules['flwr'] = None; sys.modules['cryptography'] = None\n"
        "import fedu2, fedu2.run, fedu2.cli, fedu2.paper.campaign, fedu2.evaluate, fedu2.report.page, fedu2.export\n"
        "print(fedu2.cli.main(['flower', 'keys', 'x', '--node', 'a']))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300)
    assert done.stdout.strip() == "2", done.stderr
    assert "pip install 'fedu2[flower]'" in done.stderr


def test_the_app_carries_the_experiment(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = ["method=fedema", "rounds=7", "views.crop_scale=[0.2, 1]", "flower.half=true", "fur.weight=0.3"]
    assert main(["flower", "init", str(tmp_path / "My App"), *settings]) == 0
    assert "README.md" in capsys.readouterr().out
    app = tomllib.loads((tmp_path / "My App" / "pyproject.toml").read_text())
    config = app["tool"]["flwr"]["app"]["config"]
    assert app["project"]["name"] == "my-app"
    assert config.pop("out") == str(tmp_path / "My App" / "run")
    assert resolve(experiment_of(config)) == resolve(Experiment.parse({}, settings))


def test_the_app_is_one_that_flower_builds(tmp_path: Path) -> None:
    assert main(["flower", "init", str(tmp_path / "app"), "rounds=2"]) == 0
    quiet = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1", "FLWR_HOME": str(tmp_path / "home")}
    flwr = Path(sys.executable).with_name("flwr")
    command = [flwr, "build", "--app", str(tmp_path / "app")]
    done = subprocess.run(command, cwd=tmp_path, env=quiet, capture_output=True, text=True, timeout=300)
    assert "Successfully built" in done.stdout, done.stdout + done.stderr


def test_sites_get_the_app_and_nothing_that_lies_beside_it(tmp_path: Path) -> None:
    """A run directory in the app's folder has names of sites and per-client figures in it."""
    app = tmp_path / "app"
    assert main(["flower", "init", str(app), "rounds=2"]) == 0
    (app / "run" / "checkpoint").mkdir(parents=True)
    for name in ("sites.json", "metrics.jsonl", "config.yaml", "checkpoint/manifest.json", "notes.md"):
        (app / "run" / name).write_text("{}")
    quiet = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1", "FLWR_HOME": str(tmp_path / "home")}
    flwr = Path(sys.executable).with_name("flwr")
    subprocess.run([flwr, "build", "--app", str(app)], cwd=tmp_path, env=quiet, capture_output=True, timeout=300)
    (bundle,) = tmp_path.glob("*.fab")
    names = {name for name in zipfile.ZipFile(bundle).namelist() if not name.startswith(".info/")}
    package = {f"federation/{name}.py" for name in ("__init__", "server_app", "client_app")}
    assert names == package | {"pyproject.toml", "README.md"}


@pytest.mark.parametrize(("dataset", "simulated"), [("sample", True), ("folder", False)])
def test_the_apps_readme_has_commands_that_exist(
    tmp_path: Path, dataset: str, simulated: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["flower", "init", str(tmp_path / "app"), f"dataset={dataset}"]) == 0
    readme = (tmp_path / "app" / "README.md").read_text()
    assert ("num-supernodes" in readme) == simulated
    ours = [shlex.split(line) for line in readme.splitlines() if line.startswith("    fedu2 ")]
    assert ours
    for _, *command in ours:
        options = [word for word in command if word.startswith("--")]
        capsys.readouterr()
        assert main([*command[:2], "--help"]) == 0
        told = capsys.readouterr().out
        assert all(option in told for option in options), command


@pytest.mark.parametrize(
    ("command", "complaint"),
    [
        (["--nodes", "2", "clients=5"], "clients=5, but there are 2 sites"),
        (["--nodes", "1", "flower.min_sites=2"], "flower.min_sites=2, but there are 1 site"),
        (["--nodes", "3", "--data", "a", "--data", "b"], "one folder for every site"),
    ],
)
def test_what_cannot_work_on_this_machine_is_refused_at_once(
    tmp_path: Path, command: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["flower", "local", "--out", str(tmp_path / "x"), *command]) == 2
    assert complaint in capsys.readouterr().err
    assert not (tmp_path / "x").exists()


def test_an_interrupted_trial_goes_on_with_the_same_settings_only(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = _app(tmp_path, _for_sites(["rounds=2"], None, 3))
    assert _app(tmp_path, _for_sites(["rounds=2"], None, 3)) == first
    with pytest.raises(UsageError, match="other settings"):
        _app(tmp_path, _for_sites(["rounds=2", "seed=5"], None, 3))


def test_one_site_is_enough_for_a_trial() -> None:
    assert _for_sites([], None, 1).flower.min_sites == 1


def test_a_file_is_no_folder_for_an_app(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "f").write_text("x")
    assert main(["flower", "init", str(tmp_path / "f")]) == 2
    assert "is a file" in capsys.readouterr().err


def test_a_site_that_joins_later_gets_keys_of_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "keys"
    assert main(["flower", "keys", str(folder), "--node", "north"]) == 0
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert main(["flower", "keys", str(folder), "--node", "south", "--add"]) == 0
    assert "For site south" in capsys.readouterr().out
    after = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert after.keys() - before.keys() == {"south", "south.pub"}
    assert before.items() <= after.items()
    assert main(["flower", "keys", str(folder), "--node", "north", "--add"]) == 2  # never replaced


def test_help_needs_no_flower_and_explains_arguments() -> None:
    script = "import sys; sys.modules['flwr'] = None\nimport fedu2.cli\nfedu2.cli.main(['flower', 'init', '--help'])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300)
    assert "a new folder for the app" in done.stdout, done.stderr


def test_a_folder_that_is_in_use_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.txt").write_text("x")
    assert main(["flower", "init", str(tmp_path)]) == 2
    assert "is not empty" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_keys_for_a_server_and_its_sites(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = [
        "flower",
        "keys",
        str(tmp_path / "keys"),
        "--host",
        "fed.example.org",
        "--node",
        "north",
        "--node",
        "south",
    ]
    assert main(command) == 0
    told = capsys.readouterr().out
    assert "For site north" in told
    assert "PRIVATE KEY" not in told
    assert {"ca.crt", "ca.key", "server.pem", "server.key", "north", "north.pub", "south", "south.pub"} <= {
        path.name for path in (tmp_path / "keys").iterdir()
    }
    assert main(command) == 2  # not overwritten
