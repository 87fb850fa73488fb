"""Decorrelation: both scalings against torch.corrcoef, perfect correlation and none; and FedDecorr."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

import fedu2
from fedu2.experiment import Experiment
from fedu2.methods import plain_fedavg, resolve
from fedu2.objectives import Outcome
from fedu2.options import FedDecorrOptions
from fedu2.regularizers.decorrelation import Decorrelation, decorrelation

SCALINGS = ["code", "paper"]


def _noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _mixed(n: int, d: int, seed: int = 0) -> Tensor:
    """A batch with correlated dimensions of different means and sizes."""
    x = _noise(n, d, seed=seed) @ _noise(d, d, seed=seed + 1)
    return x * torch.linspace(0.1, 10, d) + torch.linspace(-3, 3, d)


def _expected(x: Tensor, scaling: str) -> float:
    n, d = x.shape
    correlations = torch.corrcoef(x.T.double())
    if scaling == "paper":
        return float(correlations.square().sum() / d**2)
    off = correlations[~torch.eye(d, dtype=torch.bool)]
    return float((n - 1) ** 2 / n * off.square().mean())


def _weights(path: Path) -> bytes:
    newest = max((path / "checkpoint").glob("round-*"))
    return b"".join(file.name.encode() + file.read_bytes() for file in sorted(newest.glob("*.safetensors")))


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize(("n", "d"), [(2, 3), (3, 2), (8, 5), (64, 16), (5, 40)])
def test_against_corrcoef(n: int, d: int, scaling: str) -> None:
    x = _mixed(n, d)
    assert decorrelation(x, scaling).item() == pytest.approx(_expected(x, scaling), rel=1e-4)


@pytest.mark.parametrize("scaling", SCALINGS)
def test_gradient_against_corrcoef(scaling: str) -> None:
    x = _mixed(9, 4).requires_grad_()
    (gradient,) = torch.autograd.grad(decorrelation(x, scaling), x)
    exact = x.detach().double().requires_grad_()
    correlations = torch.corrcoef(exact.T)
    loss = (
        correlations.square().sum() / 16
        if scaling == "paper"
        else 64 / 9 * (correlations.square().sum() - correlations.diagonal().square().sum()) / 12
    )
    (true_gradient,) = torch.autograd.grad(loss, exact)
    torch.testing.assert_close(gradient.double(), true_gradient, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(("n", "printed"), [(64, 62.0), (128, 126.0), (256, 254.0)])
def test_perfectly_correlated_dimensions(n: int, printed: float) -> None:
    """Every dimension a multiple of one and the same: (N − 1)²/N in the code's scaling, 1 in the paper's."""
    x = _noise(n, 1) * torch.tensor([1.0, -2.0, 0.5, 30.0]) + 7
    value = decorrelation(x, "code").item()
    assert value == pytest.approx((n - 1) ** 2 / n, rel=1e-4)
    assert round(value, 1) == printed
    assert decorrelation(x, "paper").item() == pytest.approx(1, rel=1e-4)


@pytest.mark.parametrize("n", [16, 64, 256])
def test_independent_dimensions(n: int) -> None:
    """Correlations of independent samples are 1/(N − 1) in mean square: (N − 1)/N in the code's scaling."""
    x = _noise(n, 400)
    assert decorrelation(x, "code").item() == pytest.approx((n - 1) / n, rel=0.05)
    assert decorrelation(x, "paper").item() == pytest.approx(1 / 400 + 1 / (n - 1), rel=0.05)


def test_by_hand() -> None:
    # Columns (1, −1, 0), (1, 1, −2) and (2, −2, 0): correlations 0, 1 and 0.
    x = torch.tensor([[1.0, 1.0, 2.0], [-1.0, 1.0, -2.0], [0.0, -2.0, 0.0]])
    assert decorrelation(x, "code").item() == pytest.approx(4 / 3 * 2 / 6)
    assert decorrelation(x, "paper").item() == pytest.approx(5 / 9)


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("kind", ["one image", "one dimension", "all alike", "zero"])
def test_nothing_to_correlate(kind: str, scaling: str) -> None:
    x = {"one image": _noise(1, 5), "one dimension": _noise(6, 1), "all alike": torch.ones(6, 5)}.get(kind)
    x = torch.zeros(6, 5) if x is None else x
    x.requires_grad_()
    loss = decorrelation(x, scaling)
    loss.backward()
    itself = 1.0 if (kind, scaling) == ("one dimension", "paper") else 0.0
    assert loss.item() == pytest.approx(itself, abs=1e-6)
    assert x.grad is not None
    assert x.grad.abs().max() < 1e-3


@pytest.mark.parametrize("scaling", SCALINGS)
def test_a_constant_dimension_correlates_with_nothing(scaling: str) -> None:
    x = _mixed(8, 4)
    x[:, 2] = 0.1
    x.requires_grad_()
    loss = decorrelation(x, scaling)
    loss.backward()
    correlations = torch.corrcoef(x.detach()[:, [0, 1, 3]].T.double()).square()
    everything, itself = correlations.sum().item(), correlations.diagonal().sum().item()
    expected = everything / 16 if scaling == "paper" else 49 / 8 * (everything - itself) / 12
    assert loss.item() == pytest.approx(expected, rel=1e-4)
    assert x.grad is not None
    assert x.grad.isfinite().all()
    assert x.grad[:, 2].abs().max() < 1e-3  # though nearly any change of it would correlate with something


def test_batches_do_not_mix() -> None:
    views = torch.stack([_mixed(8, 5), _mixed(8, 5, seed=7)])
    together = decorrelation(views, "code")
    assert together.shape == (2,)
    for view, value in zip(views, together, strict=True):
        torch.testing.assert_close(decorrelation(view, "code"), value)


def test_bfloat16_is_summed_in_float32() -> None:
    x = _mixed(16, 8).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        rough = decorrelation(x, "code")
    assert rough.dtype == torch.float32
    assert torch.equal(rough, decorrelation(x.float(), "code"))


@pytest.mark.parametrize("scaling", SCALINGS)
def test_descent_decorrelates(scaling: str) -> None:
    x = _noise(32, 1) + 0.3 * _noise(32, 4, seed=1)
    before = decorrelation(x, "paper").item()
    for _ in range(50):
        x.requires_grad_()
        (gradient,) = torch.autograd.grad(decorrelation(x, scaling), x)
        x = x.detach() - 2 * gradient / gradient.norm()
    assert decorrelation(x, "paper").item() < 0.5 * before
    assert decorrelation(x, "paper").item() == pytest.approx(1 / 4, abs=0.2)  # what is left is the diagonal


@pytest.mark.parametrize("output", ["projector", "encoder"])
@pytest.mark.parametrize("scaling", SCALINGS)
def test_the_term_is_the_sum_over_views_and_the_log_their_mean(output: str, scaling: str) -> None:
    features, projections = (_mixed(8, 6), _mixed(8, 6, seed=1)), (_mixed(8, 3), _mixed(8, 3, seed=1))
    outcome = Outcome(torch.zeros(()), features, projections)
    options = FedDecorrOptions(weight=0.3, scaling=scaling, output=output)
    term, logged = Decorrelation(options)(outcome, torch.Generator(), torch.zeros(()))
    values = [_expected(x, scaling) for x in (projections if output == "projector" else features)]
    assert term.item() == pytest.approx(0.3 * sum(values), rel=1e-4)
    assert logged["feddecorr.loss"].item() == pytest.approx(sum(values) / 2, rel=1e-4)


@pytest.mark.parametrize("objective", ["byol", "simclr", "simsiam"])
def test_without_weight_it_is_the_plain_baseline(micro: Experiment, tmp_path: Path, objective: str) -> None:
    bare = Experiment.parse(micro.flat(), ["method=feddecorr", f"objective={objective}", "feddecorr.weight=0"])
    plain = Experiment.parse(micro.flat(), [f"method=fed{objective}"])
    runs = [fedu2.train(experiment, tmp_path / experiment.method) for experiment in (bare, plain)]
    assert _weights(runs[0].path) == _weights(runs[1].path)  # what clients remember, too
    assert runs[0].history[-1].keys() == runs[1].history[-1].keys()  # and nothing is computed in vain
    compared = plain_fedavg(resolve(bare))
    assert compared is not None
    assert (compared.method, compared.byol.target) == (f"fed{objective}", "local")


@pytest.mark.parametrize("scaling", SCALINGS)
def test_the_method_adds_the_term(micro: Experiment, tmp_path: Path, scaling: str) -> None:
    experiment = Experiment.parse(micro.flat(), ["method=feddecorr", f"feddecorr.scaling={scaling}"])
    run = fedu2.train(experiment, tmp_path / "run")
    last = run.history[-1]
    assert run.experiment.aggregator == "fedavg"
    assert last["loss"] == pytest.approx(last["align"] + 2 * 0.1 * last["feddecorr.loss"], rel=1e-4)
    assert 1 / 16 < last["feddecorr.loss"] < (1 if scaling == "paper" else 31**2 / 32)
    assert list((run.path / "checkpoint").rglob("client-*"))  # each client keeps its target network
