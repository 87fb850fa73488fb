from __future__ import annotations

from collections.abc import Callable

import cvxpy as cp
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedu2.aggregators import min_norm
from fedu2.aggregators.min_norm import change_rates, kkt_residual, min_norm_weights

SIZES = [1, 2, 3, 10, 50, 100, 300]


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def spread(vectors: Tensor, decades: float, seed: int) -> Tensor:
    """Stretch every vector by a factor from 10^-decades to 10^decades."""
    exponents = torch.rand(len(vectors), 1, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return vectors * 10 ** (decades * (2 * exponents - 1))


def with_opposites(K: int, s: int) -> Tensor:
    vectors = normal(K, 30, seed=s)
    return torch.cat([vectors, -0.5 * vectors])[-K:]


FAMILIES: dict[str, Callable[[int, int], Tensor]] = {
    "nearly orthogonal": lambda K, s: normal(K, 1000, seed=s),
    "correlated": lambda K, s: normal(K, 400, seed=s) + normal(1, 400, seed=s + 1),
    "rank 5": lambda K, s: normal(K, 5, seed=s) + 1,
    "rank 40": lambda K, s: normal(K, 40, seed=s) + 0.3,
    "zero in the hull": lambda K, s: normal(K, 5, seed=s),
    "equal": lambda K, s: normal(1, 50, seed=s).repeat(K, 1),
    "nearly parallel": lambda K, s: normal(1, 300, seed=s) + 1e-7 * normal(K, 300, seed=s + 1),
    "opposite": with_opposites,
    "a zero vector": lambda K, s: normal(K, 20, seed=s) * (torch.arange(K) != K // 2)[:, None],
    "lengths 1e-8 to 1e8": lambda K, s: spread(normal(K, 200, seed=s), 8, s),
    "such lengths, correlated": lambda K, s: spread(normal(K, 200, seed=s) + 1, 8, s),
    "such lengths, rank 4": lambda K, s: spread(normal(K, 4, seed=s), 8, s),
    "monomials": lambda K, s: torch.linspace(0, 1, K, dtype=torch.float64)[:, None] ** torch.arange(8),
    "single precision": lambda K, s: (normal(K, 20, seed=s) + 1).float(),
    "single, nearly parallel": lambda K, s: (normal(1, 20, seed=s) + 1e-5 * normal(K, 20, seed=s + 1)).float(),
}
# The last two families have Gram matrices that are indefinite by 1e-7: exactness ends there.
LIMITS = {"single precision": 1e-6, "single, nearly parallel": 1e-6}


def reference(vectors: Tensor) -> float:
    """The optimal value by an interior-point solver on the vectors themselves."""
    p = cp.Variable(len(vectors), nonneg=True)
    problem = cp.Problem(cp.Minimize(cp.sum_squares(vectors.numpy().T @ p)), [cp.sum(p) == 1])
    problem.solve(solver=cp.CLARABEL, tol_gap_abs=1e-13, tol_gap_rel=1e-13, tol_feas=1e-13)
    return float(problem.value)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("K", SIZES)
def test_certificate_holds_on_every_kind_of_vectors(K: int, family: str) -> None:
    vectors = FAMILIES[family](K, 7 * K)
    found = min_norm_weights(vectors @ vectors.T)
    assert found.weights.dtype == torch.float64
    assert found.weights.min() >= 0
    assert float(found.weights.sum()) == pytest.approx(1, abs=1e-12)
    assert found.residual <= LIMITS.get(family, 1e-10)


@pytest.mark.parametrize("family", ["nearly orthogonal", "correlated", "rank 5", "rank 40", "opposite", "monomials"])
@pytest.mark.parametrize("K", [2, 3, 10, 50])
def test_optimum_of_interior_point_solver(K: int, family: str) -> None:
    vectors = FAMILIES[family](K, 11 * K)
    found = min_norm_weights(vectors @ vectors.T)
    scale = float(vectors.square().sum(1).mean())
    assert found.value == pytest.approx(reference(vectors), rel=1e-7, abs=1e-9 * scale)


@pytest.mark.parametrize("seed", range(5))
def test_optimum_with_lengths_over_six_decades(seed: int) -> None:
    vectors = spread(normal(8, 30, seed=seed) + 0.5, 3, seed)
    vectors = vectors / vectors.norm(dim=1).min()  # the interior-point solver wants values about 1
    assert min_norm_weights(vectors @ vectors.T).value == pytest.approx(reference(vectors), rel=1e-6)


def test_weights_by_hand() -> None:
    # ‖g₁‖² = 4, ‖g₂‖² = 1, orthogonal: weights are inverse to the squared norms.
    orthogonal = min_norm_weights(torch.tensor([[4.0, 0.0], [0.0, 1.0]]))
    torch.testing.assert_close(orthogonal.weights, torch.tensor([0.2, 0.8], dtype=torch.float64))
    # (1, 0) and (2, 1): the nearest point of the segment is its end (1, 0).
    corner = min_norm_weights(torch.tensor([[1.0, 2.0], [2.0, 5.0]]))
    torch.testing.assert_close(corner.weights, torch.tensor([1.0, 0.0], dtype=torch.float64))
    # g and −3g: 0 = ¾·g + ¼·(−3g).
    opposite = min_norm_weights(torch.tensor([[1.0, -3.0], [-3.0, 9.0]]))
    torch.testing.assert_close(opposite.weights, torch.tensor([0.75, 0.25], dtype=torch.float64))


@pytest.mark.parametrize("ratio", [1e-8, 1e-4, 1e4, 1e8])
def test_two_vectors_of_very_different_length(ratio: float) -> None:
    found = min_norm_weights(torch.tensor([[1.0, 0.0], [0.0, ratio**2]], dtype=torch.float64))
    expected = torch.tensor([ratio**2, 1.0], dtype=torch.float64) / (1 + ratio**2)
    torch.testing.assert_close(found.weights, expected, rtol=1e-9, atol=0)


def test_equal_vectors_share_equally_and_zero_vectors_take_all() -> None:
    # Any weights are optimal for equal vectors; the ridge, of rounding size, shares them out about equally.
    for K in (2, 7, 50, 100, 300):
        vectors = normal(1, 40, seed=K).repeat(K, 1)
        equal = min_norm_weights(vectors @ vectors.T)
        torch.testing.assert_close(equal.weights, torch.full((K,), 1 / K, dtype=torch.float64), rtol=0.2, atol=0)
    zeros = min_norm_weights(torch.diag(torch.tensor([1.0, 0.0, 2.0, 0.0])))
    assert zeros.weights.tolist() == [0, 0.5, 0, 0.5]
    assert zeros.residual == 0


@pytest.mark.parametrize("K", [2, 10, 100, 300])
def test_theorem_1_change_rates_are_equal_over_active_clients(K: int) -> None:
    vectors = normal(K, 60, seed=K) + 0.4
    G = vectors @ vectors.T
    found = min_norm_weights(G)
    rates = change_rates(G, found.weights)
    active = found.weights > 0
    assert active.any()
    torch.testing.assert_close(rates[active], torch.full_like(rates[active], found.value), rtol=1e-9, atol=0)
    assert bool((rates >= found.value * (1 - 1e-9)).all())


def test_residual_is_honest() -> None:
    vectors = normal(20, 50, seed=3)
    G = vectors @ vectors.T
    found = min_norm_weights(G)
    uniform = torch.full((20,), 0.05, dtype=torch.float64)
    assert kkt_residual(G, uniform) > 1e-3
    assert kkt_residual(1e-12 * G, uniform) == pytest.approx(kkt_residual(G, uniform))
    distance = (found.weights - uniform) @ G @ (found.weights - uniform)
    lengths = vectors.norm(dim=1)
    assert distance <= kkt_residual(G, uniform) * (uniform @ lengths) * (found.weights @ lengths) * (1 + 1e-9)


@pytest.mark.parametrize("family", ["correlated", "rank 5", "rank 40", "such lengths, correlated", "zero in the hull"])
@pytest.mark.parametrize("K", [3, 50])
def test_monotone_fallback_reaches_the_optimum_alone(K: int, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    vectors = FAMILIES[family](K, 5)
    G = vectors @ vectors.T
    expected = min_norm_weights(G)
    monkeypatch.setattr(min_norm, "_block_pivoting", lambda M, c, solve: (solve(torch.ones(len(c)) > 0), False))
    found = min_norm_weights(G)
    assert found.residual <= 1e-10
    scale = float((found.weights @ vectors.norm(dim=1)) ** 2)
    assert found.value == pytest.approx(expected.value, rel=1e-8, abs=1e-11 * scale)


@pytest.mark.parametrize("bad", [torch.zeros(2, 3), torch.zeros(0, 0), torch.tensor([[float("nan")]])])
def test_what_is_no_gram_matrix_is_refused(bad: Tensor) -> None:
    with pytest.raises(ValueError, match="Gram matrix"):
        min_norm_weights(bad)


@st.composite
def hulls(draw: st.DrawFn) -> Tensor:
    """Few integer vectors, so that equal, zero, parallel and opposite ones are common, at lengths far apart."""
    K, P = draw(st.integers(1, 9)), draw(st.integers(1, 5))
    entries = draw(st.lists(st.integers(-3, 3), min_size=K * P, max_size=K * P))
    exponents = draw(st.lists(st.integers(-8, 8), min_size=K, max_size=K))
    vectors = torch.tensor(entries, dtype=torch.float64).view(K, P)
    return vectors * 10.0 ** torch.tensor(exponents, dtype=torch.float64)[:, None]


@settings(max_examples=200, derandomize=True)
@given(hulls())
def test_always_a_certified_point_of_the_simplex(vectors: Tensor) -> None:
    found = min_norm_weights(vectors @ vectors.T)
    assert found.weights.min() >= 0
    assert float(found.weights.sum()) == pytest.approx(1, abs=1e-12)
    assert found.residual <= 1e-8
    assert found.value <= float(vectors.square().sum(1).min()) * (1 + 1e-9)


@settings(max_examples=100, derandomize=True)
@given(hulls(), st.randoms(use_true_random=False))
def test_order_of_vectors_does_not_change_the_optimum(vectors: Tensor, random) -> None:  # type: ignore[no-untyped-def]
    order = list(range(len(vectors)))
    random.shuffle(order)
    found, shuffled = min_norm_weights(vectors @ vectors.T), min_norm_weights(vectors[order] @ vectors[order].T)
    scale = float((found.weights @ vectors.norm(dim=1)) * (shuffled.weights @ vectors.norm(dim=1)))
    assert shuffled.value == pytest.approx(found.value, rel=1e-9, abs=1e-11 * scale)
