"""Numbers do not go quietly wrong: what is not finite stops a run where it happens; a collapse is told."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fedu2
from fedu2.console import result_table, round_line
from fedu2.data import load_dataset
from fedu2.errors import TrainingError
from fedu2.evaluation.alarm import Sign, attainable, collapsed, first_signs, floors, sentence
from fedu2.evaluation.collapse import effective_rank, spectrum, spread
from fedu2.experiment import Experiment
from fedu2.federation.callbacks import Callback
from fedu2.federation.local import LocalBackend
from fedu2.federation.report import Reading, Report
from fedu2.federation.rounds import initial_state
from fedu2.federation.step import _largest
from fedu2.methods import Method, Task, build, method, resolve
from fedu2.objectives import Outcome, objectives
from fedu2.objectives.simsiam import SimSiam
from fedu2.report.content import read_sheets
from fedu2.report.page import page

FATAL = 3  # the step at which something breaks


def _breaking(name: str, harm: object) -> None:
    """A method that is SimSiam until its third step."""

    class Breaking(SimSiam):
        steps = 0

        def start(self) -> None:
            self.steps = 0

        def forward(self, view1: Tensor, view2: Tensor) -> Outcome:
            self.steps += 1
            outcome = super().forward(view1, view2)
            return harm(outcome) if self.steps == FATAL else outcome  # type: ignore[operator]

        def after_step(self, progress: float) -> None:
            if self.steps == FATAL and harm is _not_yet:
                next(norm for norm in self.modules() if hasattr(norm, "running_var")).running_var[1] = torch.inf

    objectives.register(name)(Breaking)

    @method(name, objectives=(name,), reference="none")
    def compose(experiment: Experiment) -> Method:
        """Breaks."""
        return build(experiment.with_(method="fedsimsiam"))


def _in_the_loss(outcome: Outcome) -> Outcome:
    return replace(outcome, loss=outcome.loss * torch.nan)


def _in_the_gradient(outcome: Outcome) -> Outcome:
    """√0 is a number; its slope is not."""
    return replace(outcome, loss=outcome.loss + (0 * outcome.loss).sqrt())


def _not_yet(outcome: Outcome) -> Outcome:
    """But when the step is over."""
    return outcome


HARMS = {
    "loss": (_in_the_loss, "loss became nan"),
    "gradient": (_in_the_gradient, "the gradient became nan"),
    "buffer": (_not_yet, "a batch-norm buffer became inf"),
}
for _name, (_harm, _) in HARMS.items():
    _breaking(f"breaking-{_name}", _harm)


@pytest.mark.parametrize("what", HARMS)
def test_what_is_not_finite_is_named_with_round_client_and_step(micro: Experiment, what: str) -> None:
    method = build(resolve(micro.with_(method=f"breaking-{what}", objective=f"breaking-{what}")))
    images = load_dataset("sample", method.experiment.data).train
    backend = LocalBackend(method, images, [torch.arange(64), torch.arange(64, 200)])
    told = rf"^{HARMS[what][1]} in round 7, client 1, step {FATAL}$"
    with pytest.raises(TrainingError, match=told):
        list(backend.run([Task(7, 1, 9, 0.05, 0.0)], initial_state(method, "cpu").server, {}, Callback()))
    assert backend.lanes[0].model.module.steps == FATAL  # not one step more


def test_weights_that_run_away_stop_the_run(micro: Experiment, tmp_path: Path) -> None:
    wild = micro.with_(precision="bfloat16", optimizer__lr=1e30)
    with pytest.raises(TrainingError, match=r"became (nan|inf) in round 1, client 0, step \d; there is no checkpoint"):
        fedu2.train(wild, tmp_path / "run")


def _on_the_brink(outcome: Outcome) -> Outcome:
    """A product of 3.4e38 in the forward pass: beyond bfloat16 (3.39e38), within float32 (3.403e38)."""
    product = F.linear(torch.ones(1, 1), torch.full((1, 1), 3.4e38))
    return replace(outcome, loss=outcome.loss + 1e-38 * product.sum())


_breaking("brink", _on_the_brink)


def test_half_precision_that_overflows_stops_the_run(micro: Experiment, tmp_path: Path) -> None:
    """The range of bfloat16 is that of float32 but for 0.4 %: what lies there is finite in one, and not in the other.

    Autocast alone decides: with it switched off, nothing stops the second run.
    """
    near = micro.with_(method="brink", objective="brink", local_steps=FATAL, rounds=1)
    whole = fedu2.train(near.with_(precision="float32"), tmp_path / "whole")
    assert 0 < whole.history[1]["loss"] < 4  # two steps of about −1, and one of that and 3.4
    with pytest.raises(TrainingError, match=rf"^loss became inf in round 1, client 0, step {FATAL}; there is no"):
        fedu2.train(near.with_(precision="bfloat16"), tmp_path / "half")


def test_half_precision_on_the_wire_can_overflow_and_is_refused() -> None:
    from fedu2.errors import DataError
    from fedu2.federation.flower.wire import _check, pack_tensors, unpack_tensors

    params = torch.tensor([1.0, 3.4e38])  # the largest bfloat16 is 3.39e38
    arrived = unpack_tensors(pack_tensors({"params": params}, half=("params",)))["params"]
    assert params.isfinite().all()
    assert arrived.tolist() == [1.0, torch.inf]
    with pytest.raises(DataError, match="its params are not finite"):
        _check("params", arrived, params)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("place", [0, 500, 1000])
def test_the_largest_number_shows_whether_all_are_finite(value: float, place: int) -> None:
    vector = torch.linspace(-3.4e38, 1, 1001)  # their sum and their norm are infinite; they are not
    assert _largest(vector) == vector[0].abs()
    assert _largest(vector[:0]) == 0
    vector[place] = value
    assert not _largest(vector).isfinite()


def test_what_is_watched_does_not_count_as_a_term() -> None:
    report = Report(Task(1, 0, 5, 0.1, 0.0), Callback())
    table = torch.rand(5, 4)
    report.add(Reading(("loss", "align"), table, 10))
    assert report.means() == dict(zip(("loss", "align"), table[:, :2].contiguous().mean(0).tolist(), strict=True))


@objectives.register("naked")
class Naked(SimSiam):
    """Two views alike, and nothing against the solution that all images are alike."""

    def forward(self, view1: Tensor, view2: Tensor) -> Outcome:
        h1, h2 = self.both(self.encoder, view1, view2)
        z1, z2 = self.both(self.projector, h1, h2)
        return Outcome(-F.cosine_similarity(z1, z2, dim=1).mean(), (h1, h2), (z1, z2))


@method("naked", objectives=("naked",), reference="none")
def naked(experiment: Experiment) -> Method:
    """Collapses."""
    return build(experiment.with_(method="fedsimsiam"))


class Heard(logging.Handler):
    """What was logged; `caplog` lives for a test, and the runs for all of them."""

    def __init__(self, level: int) -> None:
        super().__init__(level)
        self.told: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.told.append(record.getMessage())


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[fedu2.Run, list[str]]]:
    """Three rounds on the sample, without and with what prevents a collapse, and what was warned of."""
    folder, log, found = tmp_path_factory.mktemp("collapse"), logging.getLogger("fedu2"), {}
    settings = {
        "dataset": "sample", "data.image_size": 16, "clients": 2, "encoder": "tiny", "width": 8, "rounds": 3,
        "local_steps": 8, "batch_size": 64, "optimizer.lr": 0.3, "evaluation.every": 1, "engine.threads": 1,
    }  # fmt: skip
    for name in ("naked", "fedu2"):
        heard = Heard(logging.WARNING)
        log.addHandler(heard)
        found[name] = fedu2.train(Experiment.parse(settings | {"method": name}), folder / name), heard.told
        log.removeHandler(heard)
    return found


def test_a_collapse_is_told_once_and_written_down(runs: dict[str, tuple[fedu2.Run, list[str]]]) -> None:
    run, told = runs["naked"]
    signs = run.summary["collapse"]["projector_spread"]
    low = [record for record in run.history if "projector_spread" in record.get("collapse", {})]
    assert low[0]["round"] == signs["round"]
    assert signs["rounds"] == len(low) >= 2
    assert signs["value"] == low[0]["projector_spread"] < 0.02
    assert low[-1]["loss"] < -0.9  # nearly all views of all images alike
    assert low[-1]["projector_rank"] > 10  # which the rank does not show
    (line,) = [line for line in told if "spread" in line]
    assert line.startswith("the spread of the projections is ")
    assert f"below 0.02, in round {signs['round']}: the representation collapses" in line
    assert "too low: projector_spread" in round_line(low[0], 3)
    cells = result_table("", run.summary, None, run.path).columns[1].cells
    assert any("projector_spread was" in str(cell) for cell in cells)
    shown = page(read_sheets([run.path]))
    assert '<p class="warning">Warning: the spread of the projections is ' in shown


def test_training_that_learns_is_no_collapse(runs: dict[str, tuple[fedu2.Run, list[str]]]) -> None:
    run, told = runs["fedu2"]
    assert not told
    assert not any("collapse" in record for record in run.history)
    assert "collapse" not in run.summary
    assert 'class="warning"' not in page(read_sheets([run.path]))


def test_a_regulariser_that_does_nothing_is_told_and_a_resumed_run_does_not_repeat_it(
    micro: Experiment, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    idle = Experiment.parse(micro.flat(), ["fur.form=literal"])
    run = fedu2.train(idle, tmp_path / "run")
    assert [record.get("collapse") for record in run.history] == [None, {"fur.mass": 0.0}, {"fur.mass": 0.0}]
    assert [r.getMessage() for r in caplog.records if "matched mass" in r.getMessage()] == [
        "FUR's matched mass is 0, below 0.05, in round 1: it does nothing"
    ]
    caplog.clear()
    longer = fedu2.train(idle.with_(rounds=3), run.path, resume=True)
    assert longer.summary["collapse"]["fur.mass"] == {"round": 1, "value": 0.0, "rounds": 3}
    assert not [r for r in caplog.records if "matched mass" in r.getMessage()]


def test_floors_go_by_the_dimension() -> None:
    least = floors(512, 64, 0.02)
    assert least["effective_rank"] == pytest.approx(10.24)
    assert least["projector_rank"] == 2.0
    record = {"round": 4, "effective_rank": 10.0, "projector_rank": 3.0, "fur.mass": 0.4}
    assert collapsed(record, least) == {"effective_rank": 10.0}
    assert collapsed({**record, "round": 0}, least) == {}
    words = sentence("effective_rank", Sign(4, 10.0, 1), least["effective_rank"])
    assert words == "the effective rank of the features is 10, below 10.2, in round 4: the representation collapses"


def test_no_floor_is_beyond_what_is_attainable() -> None:
    """Nine images have a rank of 8 at most, two dimensions of 2; small projectors have small spreads to begin with."""
    least = floors(512, 2, 0.02)
    untrained = {"round": 0, "effective_rank": 7.98, "projector_rank": 1.9, "projector_spread": 0.03, "knn": 20.0}
    record = {"round": 1, "effective_rank": 7.97, "projector_rank": 1.7, "projector_spread": 0.0176, "fur.mass": 0.01}
    assert set(collapsed(record, least)) == {"effective_rank", "projector_rank", "projector_spread", "fur.mass"}
    lower = attainable(least, [untrained, record])
    assert collapsed(record, lower) == {"fur.mass": 0.01}
    assert collapsed(record | {"effective_rank": 2.0, "projector_spread": 0.008}, lower).keys() >= {
        "effective_rank",
        "projector_spread",
    }
    high = {"round": 0, "effective_rank": 333.0, "projector_spread": 0.08}
    assert attainable(least, [high]) == least
    assert attainable(least, [record]) == attainable(least, []) == least  # of an untrained model nothing is known
    assert attainable(least, [{"round": 0, "effective_rank": "x", "projector_spread": None}]) == least


@pytest.mark.parametrize(
    "settings", [{"heads.out": 2}, {"method": "fedx", "seed": 1, "local_steps": 8, "batch_size": 64}], ids=str
)
def test_healthy_runs_raise_no_alarm(settings: dict[str, object], micro: Experiment, tmp_path: Path) -> None:
    """Two dimensions; projections that FedX brings together in round 1. A resumed run knows of the untrained model."""
    experiment = Experiment.parse(micro.flat() | {"partition": "dirichlet", "alpha": 0.5, "rounds": 1} | settings)
    run = fedu2.train(experiment, tmp_path / "run")
    run = fedu2.train(experiment.with_(rounds=2), run.path, resume=True)
    assert min(record["projector_rank"] for record in run.history) < 2 or run.history[1]["projector_spread"] < 0.02
    assert "collapse" not in run.summary


def test_signs_in_damaged_records_are_passed_over() -> None:
    strange = [7, "low", None, [1.0], {"a": "x", "b": None, "c": 10**400, "d": json.loads("NaN")}, {"e": 0.5}]
    assert first_signs([{"round": n, "collapse": low} for n, low in enumerate(strange)]) == {"e": Sign(5, 0.5, 1)}


def test_spread_sees_what_the_rank_does_not() -> None:
    draw = torch.Generator().manual_seed(0)
    one_point = torch.ones(200, 16) + 1e-3 * torch.randn(200, 16, generator=draw)
    assert effective_rank(one_point) > 14
    assert spread(one_point) < 1e-5
    assert spread(torch.eye(8)) == pytest.approx(7 / 8)  # ‖e_i − 1/8‖²
    assert spread(torch.zeros(8, 4)) == 0
    features = torch.randn(100, 8, generator=draw)
    assert spread(features) == pytest.approx(float(spectrum(features).sum()))


def test_features_that_are_not_finite_name_their_round(
    micro: Experiment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fedu2 import run as runs_module

    def judge(learner: nn.Module, *_: object) -> dict[str, float]:
        raise TrainingError("the encoder gives features that are not finite")

    monkeypatch.setattr(runs_module, "evaluate", judge)
    with pytest.raises(TrainingError, match="after round 0 the encoder gives features that are not finite"):
        fedu2.train(micro, tmp_path / "run")
