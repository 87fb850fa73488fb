"""What the documents show runs as shown."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from safetensors.torch import load_file

import fedu2
from fedu2.experiment import Experiment
from fedu2.parsing import keys

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
RECIPES = sorted((ROOT / "recipes").rglob("*.yaml"))


def test_the_extensions_in_the_guide_train(micro: Experiment, tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "extending.md").read_text(), flags=re.S)
    assert len(blocks) == 4
    for block in blocks:
        exec(compile(block, "extending.md", "exec"), {"__name__": __name__})
    run = fedu2.train(micro.with_(method="feduniform", encoder="mine", aggregator="median"), tmp_path / "run")
    assert run.history[-1]["uniform"] < 0
    assert run.experiment.encoder == "mine"
    own = fedu2.train(micro.with_(method="reluctant", objective="byol"), tmp_path / "own")
    assert own.history[1]["reluctant.distance"] == 0
    assert own.history[2]["reluctant.distance"] > 0
    newest = max((own.path / "checkpoint").glob("round-*"))
    assert {"own", "target.params"} <= load_file(newest / "client-0000.safetensors").keys()


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: str(path.relative_to(ROOT / "recipes")))
def test_recipes_are_valid(recipe: Path) -> None:
    assert Experiment.load(recipe).rounds >= 1
    assert yaml.safe_load(recipe.read_text())["method"]


def test_keys_in_the_documents_exist() -> None:
    """Every `key=value` in a code span or an indented command line names a real key."""
    known = set(keys(Experiment))
    text = "\n".join(page.read_text() for page in PAGES)
    commands = re.findall(r"^ {4}(fedu2 train .*?)(?:\s+#.*)?$", text, flags=re.M)
    spans = re.findall(r"`([a-z_.0-9]+)=[^`]*`", text)
    used = {word.partition("=")[0] for command in commands for word in command.split() if "=" in word} | set(spans)
    assert "fur.weight" in used
    assert used <= known


def test_links_between_documents_lead_somewhere() -> None:
    for page in PAGES:
        prose = re.sub(r"```.*?```", "", page.read_text(), flags=re.S)
        for target, anchor in re.findall(r"\]\(([^)#:]*)#?([^):]*)\)", prose):
            place = page.parent / target if target else page
            assert place.exists(), f"{page.name} links to {target}"
            assert not anchor or anchor in _anchors(place), f"{page.name} links to {target}#{anchor}"


def _anchors(page: Path) -> set[str]:
    """The headings of a page as GitHub names them: in small letters, without signs, hyphens for spaces."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), flags=re.M)
    return {re.sub(r"[^\w\- ]|[²³]", "", heading.lower()).replace(" ", "-") for heading in headings}
