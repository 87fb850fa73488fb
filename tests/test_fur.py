"""FUR: its gradient against an independent solver, its scalings, and what it does to points."""

from __future__ import annotations

import cvxpy
import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

from fedu2.errors import UsageError
from fedu2.options import FUROptions
from fedu2.regularizers import fur, fur_toward, sphere_points
from fedu2.regularizers.fur import FORMS, away_from_rivals, matching, toward_references
from fedu2.seeds import generator

B = 128


def noise(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def batch(kind: str, d: int, seed: int, n: int = B) -> Tensor:
    """Unit vectors: what an encoder may produce, from well spread to nearly collapsed."""
    directions = normalize(noise(n, d, seed=seed), dim=-1)
    centres = normalize(noise(10, d, seed=seed + 1000), dim=-1)
    return {
        "spread": directions,
        "clustered": normalize(centres[torch.arange(n) % 10] + 0.3 * directions, dim=-1),
        "low rank": normalize(noise(n, 8, seed=seed) @ noise(8, d, seed=seed + 1000), dim=-1),
        "collapsed": normalize(centres[0] + 0.02 * directions, dim=-1),
        "tight": normalize(centres[torch.arange(n) % 4] + 0.02 * directions, dim=-1),
        "opposite": normalize(centres[0] * (1 - 2 * (torch.arange(n) % 2))[:, None] + 0.02 * directions, dim=-1),
    }[kind]


def gradient_of(z: Tensor, references: Tensor, options: FUROptions) -> Tensor:
    """∂ Σ ℓ_u / ∂z, through the normalisation inside."""
    z = z.clone().requires_grad_()
    fur_toward(z, references, options).loss.sum().backward()
    assert z.grad is not None
    return z.grad


def optimal_gradient(z: Tensor, references: Tensor, tau: float = 0.8) -> Tensor:
    """The gradient of the cosine form with the plan from cvxpy: multipliers of f_i + g_j ≤ C_ij in the dual."""
    n, m = len(z), len(references)
    f, g = cvxpy.Variable((n, 1)), cvxpy.Variable((1, m))
    feasible = f @ np.ones((1, m)) + np.ones((n, 1)) @ g <= (1 - z @ references.T).numpy()
    value = cvxpy.sum(f) + cvxpy.sum(g) - (cvxpy.sum_squares(f) + cvxpy.sum_squares(g)) / (2 * tau)
    exact = {"tol_gap_abs": 1e-10, "tol_gap_rel": 1e-10, "tol_feas": 1e-10}
    cvxpy.Problem(cvxpy.Maximize(value), [feasible]).solve(solver="CLARABEL", **exact)
    along = -torch.as_tensor(feasible.dual_value) @ references / n
    return along - (along * z).sum(-1, keepdim=True) * z


def cosine_and_norm(gradient: Tensor, exact: Tensor) -> tuple[float, float]:
    cosine = (gradient * exact).sum() / (gradient.norm() * exact.norm())
    return cosine.item(), (gradient.norm() / exact.norm()).item()


@pytest.mark.parametrize("d", [256, 512])
@pytest.mark.parametrize("kind", ["spread", "clustered", "low rank", "collapsed", "tight", "opposite"])
def test_gradient_is_that_of_the_exact_plan(kind: str, d: int) -> None:
    least_cosine = {"sinkhorn": 0.95, "fast": 0.95, "exact": 0.999}
    norm_error = {"sinkhorn": 0.1, "fast": 0.1, "exact": 0.001}
    for seed in (0, 1):
        z, references = batch(kind, d, seed), batch("spread", d, seed + 500)
        exact = optimal_gradient(z, references)
        for solver in ("sinkhorn", "exact") if kind in ("tight", "opposite") else ("sinkhorn", "fast", "exact"):
            gradient = gradient_of(z.float(), references.float(), FUROptions(gradient="plan", solver=solver))
            cosine, norm = cosine_and_norm(gradient.double(), exact)
            assert cosine >= least_cosine[solver]
            assert norm == pytest.approx(1, abs=norm_error[solver])


@pytest.mark.parametrize("solver", ["sinkhorn", "fast"])
@pytest.mark.parametrize(("n", "m"), [(64, 256), (256, 64), (16, 512)])
def test_gradient_with_unequal_numbers_of_points(n: int, m: int, solver: str) -> None:
    """A collapsed batch among many references is where unbounded over-relaxation diverges."""
    for seed in (300, 301):
        z, references = batch("collapsed", 64, seed, n).float(), batch("spread", 64, seed + 500, m).float()
        exact = gradient_of(z, references, FUROptions(gradient="plan", solver="exact"))
        cosine, norm = cosine_and_norm(gradient_of(z, references, FUROptions(gradient="plan", solver=solver)), exact)
        assert cosine >= 0.95
        assert norm == pytest.approx(1, abs=0.1)


@pytest.mark.parametrize("form", ["cosine", "literal"])
def test_gradient_equals_finite_differences_of_the_value(form: str) -> None:
    """On raw, not normalised inputs; τ = 5 makes mass move in both forms."""
    z, references, direction = noise(6, 4, seed=3), batch("spread", 4, 4, n=5), noise(6, 4, seed=5)
    options = FUROptions(gradient="plan", form=form, solver="exact", tau_a=5, tau_b=5)
    gradient = gradient_of(z, references, options)
    up, down = (fur_toward(z + h * direction, references, options).loss for h in (1e-5, -1e-5))
    assert gradient.norm() > 1e-3
    assert (gradient * direction).sum().item() == pytest.approx(((up - down) / 2e-5).item(), rel=1e-4)


def test_default_moves_mass_in_high_dimension() -> None:
    result = fur(batch("spread", 512, 0).float(), generator("cpu", 0, "fur"), FUROptions())
    assert 0.3 < result.mass < 0.6
    sharp = fur(batch("spread", 512, 0).float(), generator("cpu", 0, "fur"), FUROptions(gradient="plan"))
    assert 0.3 < sharp.mass < 0.6
    assert sharp.gap < 1e-3


def test_literal_form_moves_nothing_in_high_dimension() -> None:
    z = batch("spread", 512, 0).float().requires_grad_()
    result = fur(z, generator("cpu", 0, "fur"), FUROptions(form="literal", gradient="plan"))
    result.loss.backward()
    assert result.mass == 0
    assert z.grad is not None
    assert z.grad.abs().max() == 0
    assert result.loss.item() == pytest.approx(0.8 / B, rel=1e-5)  # both penalties in full: 2 · τ/2 · 1/N


@pytest.mark.parametrize("references", [1, 16, 512, 1024])
def test_mass_moves_for_any_number_of_references(references: int) -> None:
    z = batch("spread", 512, 0, n=64).float()
    result = fur(z, generator("cpu", 0, "fur"), FUROptions(references=references))
    assert 0.2 < result.mass <= 1


@pytest.mark.parametrize("solver", ["sinkhorn", "exact"])
def test_value_and_mass_when_references_are_the_batch_itself(solver: str) -> None:
    """Zero cost on the diagonal: everything is matched and nothing is paid."""
    z = torch.eye(8)
    result = fur_toward(z, z, FUROptions(gradient="plan", solver=solver))
    assert result.mass.item() == pytest.approx(1, abs=1e-4)
    assert result.loss.item() == pytest.approx(0, abs=1e-4)


@pytest.mark.parametrize("form", ["cosine", "literal"])
@pytest.mark.parametrize("references", [3, 20])
def test_mass_is_a_share_also_with_near_references(form: str, references: int) -> None:
    """In low dimension rows take more than their own mass when references abound; the share stays below 1."""
    options = FUROptions(gradient="plan", form=form, references=references, tau_a=40, tau_b=30, solver="exact")
    result = fur(batch("spread", 2, 0, n=10), generator("cpu", 0, "fur"), options)
    assert 0.8 < result.mass <= 1


def test_views_are_solved_together_and_get_their_own_references() -> None:
    views = torch.stack([batch("spread", 32, 0), batch("clustered", 32, 1)]).float()
    references = sphere_points((2, 40, 32), generator("cpu", 7))
    together = fur_toward(views, references, FUROptions())
    assert together.loss.shape == together.mass.shape == together.gap.shape == (2,)
    for v in range(2):
        torch.testing.assert_close(fur_toward(views[v], references[v], FUROptions()).loss, together.loss[v])
    same = fur(views[:1].repeat(2, 1, 1), generator("cpu", 7), FUROptions())
    assert same.loss[0] != same.loss[1]


def test_references_are_fresh_and_follow_from_the_generator() -> None:
    z, source = batch("spread", 32, 0).float(), generator("cpu", 7)
    first, second = (fur(z, source, FUROptions()).loss for _ in range(2))
    again = fur(z, generator("cpu", 7), FUROptions()).loss
    assert first != second
    assert first == again


def test_references_are_uniform_on_the_sphere() -> None:
    points = sphere_points((20_000, 3), generator("cpu", 0))
    torch.testing.assert_close(points.norm(dim=-1), torch.ones(20_000))
    torch.testing.assert_close(points.mT @ points / 20_000, torch.eye(3) / 3, atol=0.01, rtol=0)
    assert points.mean(0).abs().max() < 0.02


def test_length_of_the_input_does_not_matter() -> None:
    z, references = batch("spread", 32, 0).float(), batch("spread", 32, 1).float()
    short, long = (fur_toward(k * z, references, FUROptions()).loss for k in (0.1, 30))
    torch.testing.assert_close(short, long)


def test_bfloat16_and_autocast() -> None:
    z, references = batch("clustered", 64, 0).bfloat16(), batch("spread", 64, 1).float()
    plain = gradient_of(z.float(), references, FUROptions())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        result = fur_toward(z, references, FUROptions())
        gradient = gradient_of(z, references, FUROptions())
    assert result.loss.dtype == torch.float32
    assert gradient.dtype == torch.bfloat16
    cosine, norm = cosine_and_norm(gradient.float(), plain)
    assert cosine > 0.999
    assert norm == pytest.approx(1, abs=0.01)


@pytest.mark.parametrize("kind", ["identical", "zero"])
def test_degenerate_batches_stay_finite(kind: str) -> None:
    z = torch.zeros(16, 8) if kind == "zero" else torch.ones(16, 8)
    z.requires_grad_()
    result = fur(z, generator("cpu", 0), FUROptions())
    result.loss.backward()
    assert z.grad is not None
    assert torch.isfinite(result.loss)
    assert z.grad.abs().max() < 1e6


@pytest.mark.parametrize(("gradient", "d"), [("plan", 8), ("expected", 8), ("expected", 512)])
def test_descent_disperses_collapsed_points(gradient: str, d: int) -> None:
    """The purpose of it all: points that start together come apart; in many dimensions, too."""
    z = batch("collapsed", d, 0, n=64).float()
    source, options = generator("cpu", 3), FUROptions(gradient=gradient)
    for _ in range(40):
        z.requires_grad_()
        (slope,) = torch.autograd.grad(fur(z, source, options).loss, z)
        z = normalize(z.detach() - 20 * slope, dim=-1)
    assert (z @ z.T).mean() < 0.2


@pytest.mark.parametrize("kind", ["clustered", "collapsed"])
def test_one_weight_fits_all_dimensions(kind: str) -> None:
    """The expected gradient's length hardly depends on d; the plan's would fall."""

    def length(d: int) -> float:
        z, references = batch(kind, d, 0).float(), sphere_points((B, d), generator("cpu", 1))
        return float(gradient_of(z, references, FUROptions()).norm())

    assert length(2048) == pytest.approx(length(64), rel=0.25)


@pytest.mark.parametrize("kind", ["spread", "clustered", "low rank"])
def test_the_expected_gradient_is_the_mean_over_references(kind: str) -> None:
    """Stein's identity, against the mean of the smoothed plan's own gradients over 4,000 sets of references."""
    z, n, d = batch(kind, 64, 0, n=32).float(), 32, 64
    options = FUROptions(gradient="expected")
    references = sphere_points((4000, n, d), generator("cpu", 1))
    match = matching(z.expand(4000, n, d), references, FORMS["cosine"](n, n), options)
    sampled = tangent(toward_references(match).double().mean(0), z.double())
    expected = tangent(away_from_rivals(match).double().mean(0), z.double())
    cosine, norm = cosine_and_norm(expected, sampled)
    assert cosine > 0.96
    assert norm == pytest.approx(1, abs=0.1)


def test_the_expected_gradient_is_signal_where_the_plan_is_noise() -> None:
    """The share of a gradient's square that two independent sets of references agree on, in 512 dimensions."""
    z = normalize(batch("collapsed", 512, 0) + normalize(noise(B, 512, seed=9), dim=-1), dim=-1).float()
    shares = {}
    for gradient in ("plan", "expected"):
        source, options = generator("cpu", 4), FUROptions(gradient=gradient)
        draws = torch.stack([gradient_of(z, sphere_points((B, 512), source), options) for _ in range(20)])
        common = (draws[:10].mean(0) * draws[10:].mean(0)).sum()
        shares[gradient] = float(common / draws.square().sum((1, 2)).mean())
    assert shares["plan"] < 0.05
    assert shares["expected"] > 0.9


@pytest.mark.parametrize("kind", ["identical", "zero", "collapsed", "one"])
def test_the_expected_gradient_of_degenerate_batches_is_finite(kind: str) -> None:
    z = {"identical": torch.ones(16, 8), "zero": torch.zeros(16, 8), "one": torch.ones(1, 8)}.get(kind)
    z = batch("collapsed", 8, 0, n=16).float() if z is None else z
    gradient = gradient_of(z, sphere_points((16, 8), generator("cpu", 0)), FUROptions(gradient="expected"))
    assert gradient.abs().max() < 1e6


def tangent(vectors: Tensor, at: Tensor) -> Tensor:
    """Without the part along `at`, which normalisation takes away."""
    return vectors - (vectors * at).sum(-1, keepdim=True) * at


def test_a_vector_is_refused() -> None:
    with pytest.raises(UsageError, match=r"\(N, d\)"):
        fur(torch.ones(8), generator("cpu", 0), FUROptions())
