"""Linear CKA and the covariance's spectrum, against brute force."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedu2.evaluation import spectrum
from fedu2.evaluation.similarity import cka_matrix, linear_cka


def _features(seed: int, count: int = 60, dimension: int = 8) -> torch.Tensor:
    return torch.randn(count, dimension, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize(("count", "dimension"), [(60, 8), (5, 12)])
def test_the_spectrum_is_that_of_numpy(count: int, dimension: int) -> None:
    features = _features(0, count, dimension)
    z = features.numpy() / np.linalg.norm(features.numpy(), axis=1, keepdims=True)
    brute = np.linalg.svd(np.cov(z, rowvar=False, bias=True), compute_uv=False)
    assert np.allclose(spectrum(features).numpy(), brute, atol=1e-14)


def test_cka_by_brute_force() -> None:
    """As HSIC of linear kernels: tr(K H L H) / √(tr(K H K H) tr(L H L H))."""
    x, y = _features(0).numpy(), _features(1, dimension=5).numpy()
    h = np.eye(len(x)) - 1 / len(x)
    k, l_ = h @ x @ x.T @ h, h @ y @ y.T @ h
    brute = np.trace(k @ l_) / np.sqrt(np.trace(k @ k) * np.trace(l_ @ l_))
    assert linear_cka(torch.tensor(x), torch.tensor(y)) == pytest.approx(brute, rel=1e-12)


def test_cka_does_not_see_rotation_scale_and_shift() -> None:
    x, y = _features(0), _features(1)
    rotation = torch.linalg.qr(_features(2, 8)).Q
    assert linear_cka(x, x) == pytest.approx(1, abs=1e-12)
    assert linear_cka(x, 3 * x @ rotation + 5) == pytest.approx(1, abs=1e-12)
    assert linear_cka(x, y @ rotation - 1) == pytest.approx(linear_cka(x, y), abs=1e-12)
    assert linear_cka(x, x * torch.tensor([9.0] + 7 * [1.0])) < 0.9  # a stretch is no rotation


def test_cka_of_what_does_not_vary_is_0() -> None:
    assert linear_cka(_features(0), torch.ones(60, 3)) == 0


def test_the_matrix_holds_all_pairs() -> None:
    several = [_features(seed) for seed in range(3)]
    matrix = cka_matrix(several)
    assert torch.equal(matrix, matrix.T)
    assert float(matrix[2, 1]) == linear_cka(several[1], several[2])
    assert torch.allclose(matrix.diagonal(), torch.ones(3, dtype=torch.float64))
