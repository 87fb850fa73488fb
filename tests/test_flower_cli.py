"""`fedu2 flower`: the app that is written, keys, and that the core does without Flower."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from fedu2.cli import main

pytest.importorskip("flwr")

from fedu2.experiment import Experiment
from fedu2.federation.flower.server_app import experiment_of
from fedu2.methods import resolve


def test_the_core_never_imports_flower() -> None:
    script = (
        "import sys; sys.modules['flwr'] = None; sys.modules['cryptography'] = None\n"
        "import fedu2, fedu2.run, fedu2.cli, fedu2.paper.campaign, fedu2.evaluate, fedu2.report.page, fedu2.export\n"
        "print(fedu2.cli.main(['flower', 'keys', 'x', '--node', 'a']))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=100)
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
    done = subprocess.run(command, cwd=tmp_path, env=quiet, capture_output=True, text=True, timeout=100)
    assert "Successfully built" in done.stdout, done.stdout + done.stderr


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
