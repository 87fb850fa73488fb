"""A slice of `make fuzz`: every target, what is hostile on purpose, and the inputs that were once not taken well."""

from __future__ import annotations

import random
import re
import subprocess
import sys
from pathlib import Path

import pytest
from fuzz import guided
from fuzz.__main__ import main, run
from fuzz.mutate import mutate_json, spoil
from fuzz.worker import attempt, corpus, input_at, keep, known, target_named
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fedu2.errors import FedU2Error

FOUND = Path(__file__).parent / "fuzz_inputs"
QUICK = settings(max_examples=15, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])

# All that is hostile, one after the other, in a process of its own.
HOSTILE = """
from fuzz.worker import attempt, corpus, known, limit_memory, quiet, target_named
quiet()
targets = {name: (target_named(name), corpus(target_named(name))) for name in known()}
for target, (seeds, _) in targets.values():
    attempt(target, seeds[0])
limit_memory()
for name, (target, (seeds, given)) in targets.items():
    for number, data in enumerate(given[len(seeds):]):
        if problem := attempt(target, data):
            print(name, number, problem)
print("done")
"""


@pytest.mark.parametrize("name", known())
def test_seeds_reach_what_they_are_for(name: str) -> None:
    """A target whose every input is refused at the door tries nothing."""
    target = target_named(name)
    target.one_input(target.seeds()[0])


@pytest.mark.parametrize("name", known())
@given(index=st.integers(0, 1 << 40))
@QUICK
def test_mutations_are_taken_well(name: str, index: int) -> None:
    target = target_named(name)
    seeds = target.seeds()
    assert attempt(target, input_at(target, (seeds, []), 7, index)) is None


@pytest.mark.parametrize("name", known())
@given(data=st.binary(max_size=300))
@QUICK
def test_any_bytes_are_taken_well(name: str, data: bytes) -> None:
    assert attempt(target_named(name), data) is None


@pytest.mark.parametrize("path", sorted(FOUND.iterdir()), ids=lambda path: path.name)
def test_what_was_found_once_stays_mended(path: Path) -> None:
    assert attempt(target_named(path.name.partition("-")[0]), path.read_bytes()) is None


WHOLE = [path for path in sorted(FOUND.iterdir()) if not path.name.startswith("overrides-")]  # those are about keys


@pytest.mark.parametrize("path", WHOLE, ids=lambda path: path.name)
def test_what_was_found_once_is_not_turned_away_before_it_gets_there(path: Path) -> None:
    """A key that has gone since would be refused at the door, and the input would try nothing any more."""
    said = ""
    try:
        target_named(path.name.partition("-")[0]).one_input(path.read_bytes())
    except FedU2Error as error:
        said = str(error)
    assert "unknown key" not in said


def test_what_is_hostile_on_purpose_is_taken_well_within_a_gigabyte() -> None:
    told = subprocess.run([sys.executable, "-c", HOSTILE], capture_output=True, text=True, timeout=300, check=False)
    assert told.stdout == "done\n", told.stderr


@given(
    content=st.recursive(st.none() | st.integers() | st.text(), lambda x: st.lists(x) | st.dictionaries(st.text(), x))
)
@QUICK
def test_spoiling_leaves_the_original_alone(content: object) -> None:
    before = repr(content)
    spoil(content, random.Random(0))
    assert repr(content) == before


def test_the_runner_tells_of_exceptions_hangs_and_deaths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a target that is broken in every way: each way is found, once, with its input."""
    package = tmp_path / "broken"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "broken.py").write_text(
        "import os, time\n"
        "def seeds():\n    return [b'well', b'raise', b'spin', b'die', b'memory', b'raise']\n"
        "def one_input(data):\n"
        "    if data == b'raise': raise KeyError('a')\n"
        "    if data == b'spin':\n        while True: pass\n"
        "    if data == b'die': os._exit(3)\n"
        "    if data == b'memory': b'a' * (3 << 26)\n"
    )
    (tmp_path / "sitecustomize.py").write_text(
        f"import fuzz.targets, fuzz.worker\nfuzz.targets.__path__.append({str(package)!r})\n"
        "fuzz.worker.SECONDS, fuzz.worker.MEMORY = 3, 1 << 27\n"  # so little memory that a slow machine has it in time
    )
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{Path(__file__).parents[1]}")
    from fuzz import targets

    monkeypatch.setattr(targets, "__path__", [*targets.__path__, str(package)])
    assert run("broken", 0, 6, float("inf"), tmp_path) == 6
    told = {path.with_suffix("").read_bytes(): path.read_text() for path in tmp_path.glob("broken-*.txt")}
    assert set(told) == {b"raise", b"spin", b"die", b"memory"}
    assert "KeyError" in told[b"raise"]
    assert "Hang" in told[b"spin"]
    assert "died (3)" in told[b"die"]
    assert re.fullmatch(r"it took (19|20)\d MB of memory", told[b"memory"])


@pytest.mark.parametrize("led", ["run", "guided.drive"])
def test_what_was_found_before_is_found_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], led: str
) -> None:
    """As long as it is not mended, the exit status says so, and the first input stays."""

    def drive(name: str, seed: int, inputs: int, until: float, folder: Path) -> int:
        keep(folder, name, b"input", "KeyError: 'a'")
        return inputs

    monkeypatch.setattr(f"fuzz.__main__.{led}", drive)
    guided_too = ["--guided"] if "guided" in led else []
    monkeypatch.setattr(sys, "argv", ["fuzz", "--targets", "partition", "--out", str(tmp_path), *guided_too])
    for _ in range(2):
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code == 1
        assert capsys.readouterr().out.splitlines()[-2].split()[-1] == "1"
    assert len(list(tmp_path.iterdir())) == 2
    assert {path.read_bytes() for path in tmp_path.iterdir()} == {b"input", b"KeyError: 'a'"}


def test_findings_are_kept_once_for_each_place(tmp_path: Path) -> None:
    for data, place in ((b"a", "x"), (b"b", "x"), (b"c", "y")):
        keep(tmp_path, "t", data, f'  File "{place}", line 1\nKeyError: {data!r}')
    assert {path.read_bytes() for path in tmp_path.glob("t-*") if not path.suffix} == {b"a", b"c"}


def test_inputs_can_be_made_again() -> None:
    target = target_named("partition")
    inputs = [input_at(target, corpus(target), 3, index) for index in range(30)]
    assert inputs == [input_at(target, corpus(target), 3, index) for index in range(30)]
    assert inputs[:2] == target.seeds()
    assert len(set(inputs)) > 20
    assert mutate_json(b"no json", [b"a"], random.Random(0)) != b"no json"


def test_guided_fuzzing_says_what_it_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="needs atheris"):
        guided.drive("partition", 0, 10, float("inf"), tmp_path)
