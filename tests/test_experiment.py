from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from fedu2.errors import UsageError
from fedu2.experiment import Experiment
from fedu2.methods import resolve
from fedu2.parsing import keys


def test_yaml_round_trip_is_complete_and_equal() -> None:
    experiment = Experiment.parse(
        {}, ["fur.weight=0.2", "optimizer.lr=1e-3", "eua.guard=null", "views.crop_scale=[0.2,1]"]
    )
    text = experiment.to_yaml()
    assert set(keys(Experiment)) == set(experiment.flat())
    assert Experiment.parse(yaml.safe_load(text)) == experiment
    assert experiment.optimizer.lr == 1e-3
    assert experiment.eua.guard is None
    assert experiment.views.crop_scale == (0.2, 1.0)


def test_assignments_lie_over_the_file(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("clients: 7\nfur: {weight: 0.3, tau_a: 0.5}\nfur.tau_b: 0.25\n")
    experiment = Experiment.load(path, ["clients=9", "fur.tau_a=0.75"])
    assert (experiment.clients, experiment.fur.weight) == (9, 0.3)
    assert (experiment.fur.tau_a, experiment.fur.tau_b) == (0.75, 0.25)


def test_the_constructor_explains_itself_too() -> None:
    with pytest.raises(UsageError, match=r"unknown key 'metod'; did you mean 'method'\?"):
        Experiment(metod="fedu2")
    with pytest.raises(UsageError, match="alpha=0 is not allowed"):
        Experiment(alpha=0)


def test_with_replaces_single_fields() -> None:
    experiment = Experiment().with_(clients=3, fur__weight=0.0)
    assert (experiment.clients, experiment.fur.weight) == (3, 0.0)
    assert experiment.fur.tau_a == Experiment().fur.tau_a


@pytest.mark.parametrize(
    ("assignment", "sentence"),
    [
        ("alpah=1", "unknown key 'alpah'; did you mean 'alpha'?"),
        ("fur.wieght=1", "unknown key 'fur.wieght'; did you mean 'fur.weight'?"),
        ("nonsense=1", "unknown key 'nonsense'; `fedu2 train --keys` lists all keys"),
        ("alpha=0", "alpha=0 is not allowed: input should be greater than 0"),
        ("alpha=-1", "alpha=-1 is not allowed"),
        ("fur.form=cosin", "fur.form=cosin is not allowed: choose from cosine, literal; did you mean 'cosine'?"),
        ("optimizer.name=admam", "did you mean 'adam'?"),
        ("local_steps=foo", "choose from epochs, equal, a number (int)"),
        ("clients=2.5", "clients=2.5 is not allowed"),
        ("clients", "'clients' is not of the form key=value"),
        ("fur.weight=nan", "fur.weight=.nan is not allowed"),
        ("participation=1.5", "less than or equal to 1"),
        ("fur.weight.x=3", "fur.weight"),
        ("fur=3", "fur is a group of keys: set fur.weight, fur.schedule, fur.until, ..."),
        ("rounds=[", "cannot be read"),
    ],
)
def test_bad_assignments_explain_themselves(assignment: str, sentence: str) -> None:
    with pytest.raises(UsageError) as caught:
        Experiment.parse({}, [assignment])
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["a: [", "- 1\n- 2", "clients: {x: 1}", "\x00"])
def test_bad_files_explain_themselves(tmp_path: Path, text: str) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    with pytest.raises(UsageError):
        Experiment.load(path)


def test_missing_file_explains_itself(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot read"):
        Experiment.load(tmp_path / "nowhere.yaml")


NAMES = st.sampled_from([*keys(Experiment), "fur", "eua", "x", "fur.x", "", "."]) | st.text(max_size=8)
VALUES = st.none() | st.integers() | st.floats() | st.text(max_size=5) | st.lists(st.integers(), max_size=3)


@given(st.dictionaries(NAMES, VALUES, max_size=4))
def test_any_mapping_gives_an_experiment_or_a_usage_error(values: dict[str, object]) -> None:
    with contextlib.suppress(UsageError):
        assert isinstance(Experiment.parse(values), Experiment)


@given(st.text(max_size=20))
def test_any_assignment_gives_an_experiment_or_a_usage_error(text: str) -> None:
    with contextlib.suppress(UsageError):
        assert isinstance(Experiment.parse({}, [text]), Experiment)


def test_the_sample_has_defaults_of_its_own() -> None:
    small, paper = Experiment(), Experiment(dataset="cifar10")
    assert (small.encoder, small.clients, small.optimizer.lr) == ("tiny", 5, 0.06)
    assert (paper.encoder, paper.clients, paper.optimizer.lr) == ("resnet18", 10, 0.05)
    assert (paper.batch_size, paper.local_epochs, paper.rounds, paper.fur.weight) == (128, 5, 100, 2.0)
    mixed = Experiment.parse({"optimizer.momentum": 0.5, "clients": 3})
    assert (mixed.optimizer.momentum, mixed.optimizer.lr, mixed.clients) == (0.5, 0.06, 3)
    assert Experiment.parse({}, ["views.recipe=none"]).views.crop_scale is None
    assert Experiment.parse(paper.flat(), ["dataset=sample"]).encoder == "resnet18"  # what is set stays set


@pytest.mark.parametrize(
    ("settings", "objective", "aggregator", "target"),
    [
        (["method=fedu2"], "byol", "eua", "local"),
        (["method=fedu2", "objective=simclr"], "simclr", "eua", "local"),
        (["method=fedu2", "objective=simsiam", "byol.target=shared"], "simsiam", "eua", "local"),  # which has none
        (["method=fedu2", "aggregator=fedavg"], "byol", "fedavg", "local"),
        (["method=fedu2", "byol.target=shared"], "byol", "eua", "shared"),
        (["method=orchestra"], "orchestra", "fedavg", "shared"),
        (["method=fedbyol"], "byol", "fedavg", "local"),
        (["method=fedbyol", "byol.target=shared"], "byol", "fedavg", "shared"),
        (["method=fedu2", "byol.target=fresh"], "byol", "eua", "fresh"),
        (["method=fedsimclr"], "simclr", "fedavg", "local"),
        (["method=fedsimsiam"], "simsiam", "fedavg", "local"),
    ],
)
def test_methods_fill_in_their_choices(settings: list[str], objective: str, aggregator: str, target: str) -> None:
    resolved = resolve(Experiment.parse({}, settings))
    assert (resolved.objective, resolved.aggregator, resolved.byol.target) == (objective, aggregator, target)
    assert resolve(resolved) == resolved


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (["optimizer.schedule=cosine"], ("cosine", 0.5)),
        (["optimizer.schedule=cosine", "fur.until=0.2"], ("cosine", 0.2)),
        (["optimizer.schedule=cosine", "fur.schedule=constant"], ("constant", 1.0)),
        (["optimizer.schedule=constant"], ("constant", 1.0)),
        (["optimizer.schedule=constant", "fur.schedule=cosine"], ("cosine", 0.5)),
        (["optimizer.schedule=cosine", "method=fedbyol"], ("constant", 1.0)),
    ],
)
def test_the_weight_of_fur_falls_where_the_rate_does(settings: list[str], expected: tuple[str, float]) -> None:
    resolved = resolve(Experiment.parse({}, settings))
    assert (resolved.fur.schedule, resolved.fur.until) == expected
    assert resolve(resolved) == resolved


@pytest.mark.parametrize(("gone", "schedule"), [({"fur.schedule", "fur.until"}, "constant"), ({"fur.until"}, "cosine")])
@pytest.mark.parametrize("method", ["fedu2", "fedbyol"])
def test_runs_from_before_schedules_of_fur_are_read_as_what_they_meant(
    method: str, gone: set[str], schedule: str
) -> None:
    run = resolve(Experiment.parse({"dataset": "cifar10", "method": method, "fur.schedule": "cosine"})).flat()
    older = Experiment.parse({key: value for key, value in run.items() if key not in gone})
    assert (older.fur.schedule, older.fur.until) == (schedule, 1.0)
    assert resolve(older) == older  # whether it is resolved or not, so that nothing takes it for another


def test_a_few_keys_of_fur_make_no_older_run() -> None:
    given = {"dataset": "cifar10", "fur.weight": 0.1, "fur.form": "literal", "fur.solver": "fast"}
    assert resolve(Experiment.parse(given)).fur.schedule == "cosine"


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (["method=fedu3"], "unknown method 'fedu3'"),
        (["method=fedbyoll"], "did you mean 'fedbyol'?"),
        (["objective=byool"], "did you mean 'byol'?"),
        (["aggregator=eau"], "unknown aggregator 'eau'"),
        (["method=fedbyol", "objective=simclr"], "'fedbyol' does not go with objective=simclr: choose from byol"),
    ],
)
def test_unknown_parts_explain_themselves(settings: list[str], sentence: str) -> None:
    with pytest.raises(UsageError) as caught:
        resolve(Experiment.parse({}, settings))
    assert sentence in str(caught.value)
