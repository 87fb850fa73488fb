"""The first convolution: the plain form against `nn.Conv2d`, the kernels against float64.

Tests of the kernels need Triton and a GPU, or Triton's interpreter: TRITON_INTERPRET=1 in the environment.
"""

from __future__ import annotations

import copy
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from conftest import DEVICE
from fedu2.models.resnet import BasicBlock, ResNet
from fedu2.models.stem import Stem

needs_gpu = pytest.mark.usefixtures("needs_gpu")


def noise(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, device=DEVICE).to(dtype, memory_format=torch.channels_last)


# The plain form.


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("fused", [False, True])
def test_a_stem_is_a_convolution(stride: int, fused: bool) -> None:
    torch.manual_seed(0)
    theirs = nn.Conv2d(3, 16, 3, stride, padding=1, bias=False)
    torch.manual_seed(0)
    ours = Stem(3, 16, 3, stride, padding=1, bias=False)
    ours.fused = fused  # its weight does not have channels last: the kernels would not take it
    assert torch.equal(ours.weight, theirs.weight)
    x = torch.randn(2, 3, 9, 8, requires_grad=True)
    found, expected = ours(x), theirs(x)
    assert torch.equal(found, expected)
    direction = torch.randn_like(expected)
    for a, b in zip(
        torch.autograd.grad(found, [x, ours.weight], direction),
        torch.autograd.grad(expected, [x, theirs.weight], direction),
        strict=True,
    ):
        assert torch.equal(a, b)


def test_a_resnet_begins_with_a_stem_under_the_old_name() -> None:
    encoder = ResNet(BasicBlock, (1,), 16)
    assert isinstance(encoder.stem[0], Stem)
    assert not encoder.stem[0].fused
    assert encoder.state_dict()["stem.0.weight"].shape == (16, 3, 3, 3)
    assert "stem.0.bias" not in encoder.state_dict()


# The kernels.


@pytest.fixture
def kernels(needs_kernels: None) -> ModuleType:
    from fedu2.models import stem_kernel

    return stem_kernel


def exact(x: Tensor, weight: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
    """Y and dW in float64 by torch."""
    weight = weight.detach().double().requires_grad_()
    y = F.conv2d(x.double(), weight, padding=1)
    return y, *torch.autograd.grad(y, weight, dy.double())


def by_kernels(kernels: ModuleType, x: Tensor, weight: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
    """The same by the kernels; they need not be `supported`: float32 also runs on a GPU, only slowly."""
    weight = weight.detach().requires_grad_()
    y = kernels.convolve(x, weight)
    (dweight,) = torch.autograd.grad(y, weight, dy)
    assert y.dtype == dweight.dtype == x.dtype
    assert y.is_contiguous(memory_format=torch.channels_last)
    assert dweight.stride() == weight.stride()
    return y, dweight


def check(kernels: ModuleType, x: Tensor, weight: Tensor, dy: Tensor, rounding: float = 0.0) -> None:
    """`rounding` of the result, relative to each value, and float32's sums, relative to the largest."""
    for found, expected in zip(by_kernels(kernels, x, weight, dy), exact(x, weight, dy), strict=True):
        allowed = rounding * expected.abs() + 1e-5 * expected.abs().max()
        assert ((found.double() - expected).abs() <= allowed).all()


@pytest.mark.parametrize("images", [1, 3, 5])
@pytest.mark.parametrize("size", [8, 16, 32, 33])
@pytest.mark.parametrize("outputs", [16, 48, 64])
def test_kernels_against_float64(kernels: ModuleType, images: int, size: int, outputs: int) -> None:
    torch.manual_seed(0)
    check(kernels, noise(images, 3, size, size), noise(outputs, 3, 3, 3), noise(images, outputs, size, size))


@pytest.mark.parametrize("shape", [(2, 3, 7, 12), (3, 3, 5, 1), (1, 3, 1, 1), (2, 3, 40, 9)])
def test_programs_with_many_small_tiles(
    kernels: ModuleType, monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...]
) -> None:
    for name in ("FORWARD", "GRADIENT"):
        monkeypatch.setattr(kernels, name, kernels.Launch(programs=3, rows=32, warps=4, stages=2))
    torch.manual_seed(0)
    check(kernels, noise(*shape), noise(128, 3, 3, 3), noise(shape[0], 128, *shape[2:]))


def test_a_gradient_in_another_memory_order(kernels: ModuleType) -> None:
    torch.manual_seed(0)
    check(kernels, noise(2, 3, 8, 8), noise(16, 3, 3, 3), noise(2, 16, 8, 8).contiguous())


@pytest.fixture
def calls(kernels: ModuleType, monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The inputs that reached the kernels."""
    seen: list[Tensor] = []
    convolve = kernels.convolve

    def recorded(x: Tensor, weight: Tensor) -> Tensor:
        seen.append(x)
        return convolve(x, weight)  # type: ignore[no-any-return]

    monkeypatch.setattr(kernels, "convolve", recorded)
    return seen


def stem(kernels: ModuleType, outputs: int = 16, **options: Any) -> Stem:
    """A stem that lets the kernels work, if its options do."""
    layer = Stem(3, outputs, 3, **({"padding": 1, "bias": False} | options))
    layer = layer.to(DEVICE, kernels.DTYPE, memory_format=torch.channels_last)
    layer.fused = True
    return layer


def test_a_fused_stem_takes_the_kernels(kernels: ModuleType, calls: list[Tensor]) -> None:
    layer, x = stem(kernels), noise(2, 3, 8, 8, dtype=kernels.DTYPE)
    layer(x).sum().backward()
    with torch.no_grad():
        layer.eval()(x)
    assert len(calls) == 2
    assert layer.weight.grad is not None
    layer.fused = False
    layer(x)
    assert len(calls) == 2


OTHER_OPTIONS: list[dict[str, Any]] = [
    {"stride": 2},
    {"padding": 0},
    {"padding": 2, "dilation": 2},
    {"groups": 3, "outputs": 48},
    {"padding_mode": "reflect"},
    {"bias": True},
    {"outputs": 24},
    {"outputs": 144},
]


@pytest.mark.parametrize("options", OTHER_OPTIONS, ids=str)
def test_other_convolutions_are_left_to_torch(
    kernels: ModuleType, calls: list[Tensor], options: dict[str, Any]
) -> None:
    layer, x = stem(kernels, **options), noise(2, 3, 8, 8, dtype=kernels.DTYPE)
    assert torch.isfinite(layer(x)).all()
    assert not calls


def test_other_inputs_are_left_to_torch(kernels: ModuleType, calls: list[Tensor]) -> None:
    layer, x = stem(kernels), noise(2, 3, 8, 8, dtype=kernels.DTYPE)
    for other in (x.contiguous(), x[..., 1:], x.clone().requires_grad_()):
        assert layer(other).shape == (2, 16, *other.shape[2:])
    copy.deepcopy(layer).double()(x.double())
    layer.weight.data = layer.weight.data.contiguous()
    layer(x)
    assert not calls


def test_float32_weights_under_autocast_are_left_to_torch(kernels: ModuleType, calls: list[Tensor]) -> None:
    layer, x = stem(kernels).float(), noise(2, 3, 8, 8, dtype=torch.bfloat16)
    with torch.autocast(DEVICE.type, torch.bfloat16):
        assert layer(x).dtype == torch.bfloat16
    assert not calls


# On a GPU.


@needs_gpu
@pytest.mark.parametrize(("images", "size", "outputs"), [(256, 32, 64), (37, 33, 48), (64, 64, 128), (5, 32, 16)])
def test_kernels_in_bfloat16(kernels: ModuleType, images: int, size: int, outputs: int) -> None:
    torch.manual_seed(0)
    half = torch.bfloat16
    x, weight = noise(images, 3, size, size, dtype=half), noise(outputs, 3, 3, 3, dtype=half)
    dy = noise(images, outputs, size, size, dtype=half)
    check(kernels, x, weight, dy, rounding=2.0**-8)
    first, again = (by_kernels(kernels, x, weight, dy) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@needs_gpu
def test_kernels_in_a_graph(kernels: ModuleType) -> None:
    torch.manual_seed(0)
    layer = stem(kernels, 64)
    x, dy = noise(32, 3, 32, 32, dtype=torch.bfloat16), noise(32, 64, 32, 32, dtype=torch.bfloat16)

    def step() -> tuple[Tensor, Tensor]:
        y = layer(x)
        return y, *torch.autograd.grad(y, layer.weight, dy)

    step()  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for _ in range(3):
        x.normal_()
        graph.replay()
        assert all(torch.equal(found, expected) for found, expected in zip(captured, step(), strict=True))
