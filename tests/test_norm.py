"""Batch norm with residual and ReLU: the plain form against `nn.BatchNorm`, the kernels against float64.

Tests of the kernels need Triton and a GPU, or Triton's interpreter: TRITON_INTERPRET=1 in the environment. Those of
long groups need NumPy < 2.4 in the interpreter, which takes arrays of one element for the bounds of a loop.
"""

from __future__ import annotations

import copy
import itertools
import weakref
from types import ModuleType

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from conftest import DEVICE
from fedu2.experiment import Experiment
from fedu2.kernels import INTERPRETED
from fedu2.models import build_encoder, mlp
from fedu2.models.norm import Norm, grouped, only_our_norms, second, supported, use_fused
from fedu2.models.resnet import BasicBlock, Bottleneck, ResNet
from fedu2.objectives import objectives

needs_gpu = pytest.mark.usefixtures("needs_gpu")


def filled(module: nn.Module) -> nn.Module:
    """Weights and statistics that differ from channel to channel."""
    for child in module.modules():
        if isinstance(child, nn.modules.batchnorm._BatchNorm):
            for tensor in (child.weight.data, child.bias.data, child.running_mean):
                tensor.normal_()
            child.running_var.uniform_(0.5, 2)
    return module


# The plain form: bit by bit what separate layers compute.


def separate(module: nn.Module) -> nn.Module:
    """A copy with torch's own layers in place of ours."""
    module = copy.deepcopy(module)
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, Norm):
                theirs = nn.BatchNorm2d(child.num_features)
                theirs.load_state_dict(child.state_dict())
                setattr(parent, name, theirs)
    return module


def separate_forward(encoder: nn.Module, x: Tensor) -> Tensor:
    """The forward pass of a ResNet, layer by layer."""
    x = F.relu(encoder.stem[1](encoder.stem[0](x)))
    for stage in encoder.stages:
        for block in stage:
            y = F.relu(block.bn1(block.conv1(x)))
            y = block.bn2(block.conv2(y))
            if hasattr(block, "conv3"):
                y = block.bn3(block.conv3(F.relu(y)))
            x = F.relu(y + block.shortcut(x))
    return F.adaptive_avg_pool2d(x, 1).flatten(1)


@pytest.mark.parametrize("block", [BasicBlock, Bottleneck])
@pytest.mark.parametrize("memory", [torch.contiguous_format, torch.channels_last])
def test_a_resnet_is_its_layers_one_by_one(
    block: type[BasicBlock] | type[Bottleneck], memory: torch.memory_format
) -> None:
    torch.manual_seed(0)
    ours = filled(ResNet(block, (2, 1), 4))
    theirs = separate(ours)
    x = torch.randn(6, 3, 12, 12).to(memory_format=memory)
    for _ in range(2):
        features, expected = ours(x), separate_forward(theirs, x)
        direction = torch.randn_like(features)
        features.backward(direction)
        expected.backward(direction)
        assert torch.equal(features, expected)
    for (name, p), q in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad), name
    for (name, p), q in zip(ours.named_buffers(), theirs.buffers(), strict=True):
        assert torch.equal(p, q), name
    assert torch.equal(ours.eval()(x), separate_forward(theirs.eval(), x))


def test_a_head_is_its_layers_one_by_one() -> None:
    torch.manual_seed(0)
    head = filled(mlp(5, 7, 3))
    theirs = nn.Sequential(nn.Linear(5, 7, bias=False), nn.BatchNorm1d(7), nn.ReLU(), nn.Linear(7, 3))
    theirs.load_state_dict(head.state_dict())
    x = torch.randn(9, 5)
    assert torch.equal(head(x), theirs(x))
    assert torch.equal(head[1].running_var, theirs[1].running_var)


def test_names_are_those_of_old_checkpoints() -> None:
    statistics = ["weight", "bias", "running_mean", "running_var", "num_batches_tracked"]
    norm = [f"1.{name}" for name in statistics]
    assert list(mlp(5, 7, 3).state_dict()) == ["0.weight", *norm, "3.weight", "3.bias"]
    names = list(build_encoder("resnet18", 2).state_dict())
    assert names[:6] == ["stem.0.weight", *(f"stem.{name}" for name in norm)]
    assert [name for name in names if name.startswith("stages.1.0.")] == [
        f"stages.1.0.{name}"
        for name in (
            *("conv1.weight", *(f"bn1.{s}" for s in statistics)),
            *("conv2.weight", *(f"bn2.{s}" for s in statistics)),
            *("shortcut.0.weight", *(f"shortcut.1.{s}" for s in statistics)),
        )
    ]


@pytest.mark.parametrize("shape", [(6, 5), (6, 5, 3, 4)])
def test_groups_are_separate_batches(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    ours = filled(Norm(5))
    theirs = separate(nn.Sequential(ours))[0] if len(shape) == 4 else nn.BatchNorm1d(5)
    theirs.load_state_dict(ours.state_dict())
    x, residual = torch.randn(shape), torch.randn(shape)
    with grouped(ours, 3):
        y = ours(x, residual, relu=True)
    assert torch.equal(y, F.relu(torch.cat([theirs(part) for part in x.chunk(3)]) + residual))
    for a, b in zip(ours.buffers(), theirs.buffers(), strict=True):
        assert torch.equal(a, b)
    with grouped(ours.eval(), 3):
        assert torch.equal(ours(x), theirs.eval()(x))


def test_a_batch_must_be_whole_groups() -> None:
    norm = Norm(2)
    with grouped(norm, 2), pytest.raises(ValueError, match="5 is not 2 batches"):
        norm(torch.randn(5, 2))
    with pytest.raises(ValueError, match="got 3 axes"):
        norm(torch.randn(5, 2, 2))


def test_groups_end_with_the_block() -> None:
    head = mlp(2, 3, 2)
    with grouped(head, 2), pytest.raises(ValueError, match="2 batches"):
        head(torch.randn(5, 2))
    assert head[1].groups == 1
    with pytest.raises(ValueError, match="4 batches"), grouped(head, 4):
        head(torch.randn(5, 2))
    assert head[1].groups == 1


def test_other_norms_are_found() -> None:
    assert only_our_norms(build_encoder("tiny", 2))
    assert only_our_norms(nn.Sequential(Norm(3), nn.LayerNorm(3)))
    assert not only_our_norms(nn.Sequential(Norm(3), nn.Sequential(nn.BatchNorm1d(3))))


@pytest.mark.parametrize("name", ["byol", "simclr", "simsiam"])
def test_paired_views_are_two_passes(name: str) -> None:
    torch.manual_seed(0)
    apart = filled(objectives[name](build_encoder("tiny", 4), Experiment()))
    paired = copy.deepcopy(apart)
    paired.paired = True
    views = torch.randn(8, 3, 16, 16), torch.randn(8, 3, 16, 16)
    expected, outcome = apart(*views), paired(*views)
    expected.loss.backward()
    outcome.loss.backward()
    close = {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(outcome.loss, expected.loss, **close)
    torch.testing.assert_close(outcome.features, expected.features, **close)
    torch.testing.assert_close(outcome.projections, expected.projections, **close)
    for (parameter, p), q in zip(paired.named_parameters(), apart.parameters(), strict=True):
        if q.grad is None:
            assert p.grad is None, parameter
        else:
            assert (p.grad - q.grad).norm() <= 1e-4 * q.grad.norm() + 1e-6, parameter
    for (buffer, p), q in zip(paired.named_buffers(), apart.buffers(), strict=True):
        torch.testing.assert_close(p, q, **close, msg=buffer)
    assert not any(child.groups > 1 for child in paired.modules() if isinstance(child, Norm))


def test_without_a_gpu_fused_norms_are_plain() -> None:
    if DEVICE.type == "cuda" or INTERPRETED:
        pytest.skip("kernels run here")
    torch.manual_seed(0)
    plain = filled(Norm(3))
    fused = copy.deepcopy(plain)
    use_fused(fused, True)
    x = torch.randn(4, 3)
    assert not supported(x)
    assert torch.equal(fused(x), plain(x))


# The kernels.


@pytest.fixture
def kernels(needs_kernels: None) -> ModuleType:
    from fedu2.models import norm_kernel

    return norm_kernel


@pytest.fixture
def small_tiles(kernels: ModuleType, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Tiles so small that a small tensor has many, in kernels for long groups."""
    if INTERPRETED and np.lib.NumpyVersion(np.__version__) >= "2.4.0":
        pytest.skip("Triton's interpreter needs NumPy < 2.4 for loops whose length is not known in advance")
    monkeypatch.setattr(kernels, "SHORT", 0)
    launches = {"STATISTICS": (9, 512), "APPLY": (7, 1024), "SUMS": (5, 512), "GRADIENT": (6, 512)}
    for name, (programs, elements) in launches.items():
        monkeypatch.setattr(kernels, name, kernels.Launch(programs, elements, warps=4, stages=1))
    return kernels


def noise(*shape: int, like: Tensor | None = None) -> Tensor:
    x = torch.randn(shape, device=DEVICE)
    if x.ndim == 4:
        x = x.contiguous(memory_format=torch.channels_last)
    return x if like is None else x.to(like.dtype)


def exact(norm: Norm, x: Tensor, residual: Tensor | None, relu: bool, *directions: Tensor) -> dict[str, Tensor]:
    """Everything that a norm computes, in float64 by torch; `directions` are the gradients of y's readers."""
    norm = copy.deepcopy(norm).double()
    norm.fused = False
    x, residual = (None if t is None else t.detach().double().requires_grad_() for t in (x, residual))
    y = norm(x, residual, relu)
    y.backward(sum(direction.double() for direction in directions))
    return everything(norm, x, residual, y)


def everything(norm: Norm, x: Tensor, residual: Tensor | None, y: Tensor) -> dict[str, Tensor]:
    found = {"y": y, "dx": x.grad, "dw": norm.weight.grad, "db": norm.bias.grad}
    if residual is not None:
        found["dr"] = residual.grad
    return found | {"mean": norm.running_mean, "var": norm.running_var}


def fused(norm: Norm, x: Tensor, residual: Tensor | None, relu: bool, *directions: Tensor) -> dict[str, Tensor]:
    """The same by the kernels."""
    norm = copy.deepcopy(norm)
    norm.fused = True
    x, residual = (None if t is None else t.detach().clone().requires_grad_() for t in (x, residual))
    assert supported(x)
    y = norm(x, residual, relu)
    assert second(y) is not y
    assert second(y).data_ptr() == y.data_ptr()
    torch.autograd.backward([y, second(y)][: len(directions)], directions)
    for tensor in (y, x.grad):
        assert tensor.dtype == x.dtype
        assert tensor.stride() == x.stride()
    return everything(norm, x, residual, y)


def check(norm: Norm, x: Tensor, residual: Tensor | None, relu: bool, *directions: Tensor, within: float) -> None:
    """`fused` against `exact`, relative to the largest value.

    Where rounding may decide on which side of ReLU's bend a value lies, its gradient is left out. Values are of size 1
    and means up to 1000, which float32 knows to 2⁻¹⁴ = 6e-5: the bend is sixteen times as wide.
    """
    bend = exact(norm, x, residual, False, *directions)["y"].abs() < BEND
    assert bend.float().mean() < 0.02
    directions = tuple(direction.masked_fill(bend, 0) for direction in directions)
    expected = exact(norm, x, residual, relu, *directions)
    for name, found in fused(norm, x, residual, relu, *directions).items():
        off = (found.double() - expected[name]).abs().max() / expected[name].abs().max()
        assert off <= within, f"{name} is off by {off:.1e}"


BEND = 1e-3
CASES = [  # shape, groups, residual, relu, readers
    ((6, 24, 3, 3), 1, False, True, 1),
    ((6, 24, 3, 3), 2, True, True, 2),
    ((4, 64, 5, 7), 2, True, True, 1),
    ((4, 64, 5, 7), 1, False, False, 2),
    ((4, 96, 3, 5), 2, True, False, 1),
    ((6, 130), 2, False, True, 2),
    ((9, 16), 3, True, False, 2),
]


@pytest.mark.parametrize(("shape", "groups", "with_residual", "relu", "readers"), CASES)
@pytest.mark.parametrize("short", [True, False])
def test_kernels_against_float64(
    kernels: ModuleType,
    request: pytest.FixtureRequest,
    shape: tuple[int, ...],
    groups: int,
    with_residual: bool,
    relu: bool,
    readers: int,
    short: bool,
) -> None:
    if not short:
        request.getfixturevalue("small_tiles")
    torch.manual_seed(0)
    norm = filled(Norm(shape[1])).to(DEVICE)
    norm.groups = groups
    x, residual = 2 * noise(*shape) + 3, noise(*shape) if with_residual else None
    check(norm, x, residual, relu, *(noise(*shape) for _ in range(readers)), within=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("short", [True, False])
def test_kernels_in_half_precision(
    kernels: ModuleType, request: pytest.FixtureRequest, dtype: torch.dtype, short: bool
) -> None:
    if not short:
        request.getfixturevalue("small_tiles")
    torch.manual_seed(0)
    norm = filled(Norm(40)).to(DEVICE)
    norm.groups = 2
    x, residual, dy, again = (noise(4, 40, 3, 5).to(dtype) for _ in range(4))
    # The interpreter cuts bfloat16 off where a GPU rounds: one unit in the last place, on the largest value.
    check(norm, x, residual, True, dy, again, within=2 * 2.0**-7 if dtype == torch.bfloat16 else 2.0**-9)


@pytest.mark.parametrize("short", [True, False])
def test_a_large_mean_hides_no_variance(kernels: ModuleType, request: pytest.FixtureRequest, short: bool) -> None:
    if not short:
        request.getfixturevalue("small_tiles")
    torch.manual_seed(0)
    norm = Norm(20).to(DEVICE)
    x = noise(8, 20, 4, 3) + 1000  # float32 knows such a mean to 3e-5, and x² to 0.03
    check(norm, x, None, True, noise(8, 20, 4, 3), within=5e-4)
    norm.fused = True
    norm.momentum = 1.0
    norm(x)
    exactly = x.double().transpose(0, 1).flatten(1).var(1)
    assert ((norm.running_var - exactly).abs() / exactly).max() < 1e-4


@pytest.mark.parametrize("short", [True, False])
def test_backward_knows_what_relu_let_pass(kernels: ModuleType, request: pytest.FixtureRequest, short: bool) -> None:
    if not short:
        request.getfixturevalue("small_tiles")
    torch.manual_seed(0)
    norm = filled(Norm(20)).to(DEVICE)
    norm.fused = True
    x = 1000 + noise(32, 20, 4, 3).mul(8).round() / 8  # some fifty different values, many of which occur often
    norm.bias.data.zero_()
    norm.bias.data -= norm(x).detach()[0, :, 0, 0]  # one value of each channel comes to lie at the bend
    y = norm(x, relu=True)
    y.backward(torch.ones_like(y))
    assert torch.equal(norm.bias.grad, (y > 0).sum((0, 2, 3)).float())


def test_a_head_of_2048_columns(kernels: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "SHORT_COLUMNS", 128)  # fewer programs: the interpreter runs one after another
    torch.manual_seed(0)
    norm = filled(Norm(2048)).to(DEVICE)
    norm.groups = 2
    check(norm, noise(16, 2048), None, True, noise(16, 2048), within=1e-5)


@pytest.mark.parametrize("short", [True, False])
def test_kernels_hide_no_nan(kernels: ModuleType, request: pytest.FixtureRequest, short: bool) -> None:
    if not short:
        request.getfixturevalue("small_tiles")
    x = noise(4, 8, 3, 3)
    x[1, 2, 0, 0] = torch.nan
    found = fused(Norm(8).to(DEVICE), x, None, True, noise(4, 8, 3, 3))
    for name in ("y", "dx"):
        assert found[name][:, 2].isnan().all(), name
        assert found[name][:, 3].isfinite().all(), name


def test_kernels_without_gradients(kernels: ModuleType) -> None:
    torch.manual_seed(0)
    norm = filled(Norm(8)).to(DEVICE)
    norm.fused = True
    theirs = copy.deepcopy(norm)
    x, residual = noise(4, 8, 3, 3), torch.randn(4, 8, 3, 3, device=DEVICE)
    with torch.no_grad():
        y = norm(x, residual, relu=True)
    assert second(y) is y
    assert torch.equal(y, theirs(x, residual, relu=True))
    assert torch.equal(norm.running_var, theirs.running_var)


def test_kernels_leave_other_cases_to_torch(kernels: ModuleType) -> None:
    norm = filled(Norm(8)).to(DEVICE)
    use_fused(norm, True)
    x = noise(4, 8, 3, 3)
    assert second(norm(x)) is not norm(x)
    for other in (x.contiguous(), x.double(), x[..., 1:]):
        assert not supported(other)
    rows = torch.randn(4, 8, 3, 3, device=DEVICE)
    assert not hasattr(norm(rows), "second")
    assert not hasattr(norm.eval()(x), "second")
    with pytest.raises(ValueError, match="one value a channel"):
        norm.train()(noise(1, 8))


def test_a_fused_resnet_is_a_resnet(kernels: ModuleType) -> None:
    torch.manual_seed(0)
    plain = filled(ResNet(BasicBlock, (2, 1), 8)).to(DEVICE)
    ours = copy.deepcopy(plain)
    use_fused(ours, True)
    x = noise(4, 3, 6, 6)
    direction = torch.randn(4, 16, device=DEVICE)
    with torch.backends.cudnn.flags(allow_tf32=False):
        for encoder in (plain, ours):
            with grouped(encoder, 2):
                encoder(x).backward(direction)
    for (name, p), q in zip(ours.named_parameters(), plain.named_parameters(), strict=True):
        assert (p.grad - q[1].grad).norm() <= 1e-4 * q[1].grad.norm(), name
    for (name, p), q in zip(ours.named_buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5, msg=name)


def test_blocks_hand_on_outputs_for_two_readers(kernels: ModuleType) -> None:
    encoder = ResNet(BasicBlock, (1, 1), 8).to(DEVICE)
    use_fused(encoder, True)
    x = encoder.stem(noise(2, 3, 4, 4))
    for stage in encoder.stages:
        assert second(x) is not x
        x = stage(x)
    assert second(x) is not x


def test_two_readers_do_not_keep_an_output_alive(kernels: ModuleType) -> None:
    norm = Norm(8).to(DEVICE)
    norm.fused = True
    y = norm(noise(4, 8).requires_grad_())
    assert second(y) is not y
    gone = weakref.ref(y)
    del y
    assert gone() is None  # at once: nothing refers to it in a circle


SHAPES = [(256, 64, 32, 32), (256, 128, 16, 16), (256, 512, 4, 4), (256, 2048), (37, 64, 31, 17)]


@needs_gpu
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernels_at_full_size(kernels: ModuleType, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    norm = filled(Norm(shape[1])).to(DEVICE)
    norm.groups = 1 if shape[0] % 2 else 2
    x, residual, dy, again = (noise(*shape).to(dtype) for _ in range(4))
    check(norm, x, residual, True, dy, again, within=1e-5 if dtype == torch.float32 else 2.0**-7)
    first, once_more = (fused(norm, x, residual, True, dy, again) for _ in range(2))
    assert all(torch.equal(first[name], once_more[name]) for name in first)


@needs_gpu
def test_batches_of_other_sizes_compile_nothing(kernels: ModuleType) -> None:
    def train(images: int) -> int:
        """Compiled kernels after a pass over norms of long and of short groups, at two places of a model's vector."""
        for start, shape in itertools.product((0, 1), [(2 * images, 64, 16, 16), (2 * images, 512)]):
            norm = Norm(shape[1]).to(DEVICE)
            norm.groups, norm.fused = 2, True
            vector = torch.randn(2 * shape[1] + start, device=DEVICE)
            norm.weight.data, norm.bias.data = vector[start:].chunk(2)
            y = norm(noise(*shape).to(torch.bfloat16).requires_grad_(), relu=True)
            y.backward(y.detach())
        made = [value for name, value in vars(kernels).items() if name.endswith("_kernel")]
        return sum(len(cache[0]) for kernel in made for cache in kernel.device_caches.values())

    before = train(128)
    assert before >= 6
    assert [train(images) for images in (17, 40, 99)] == [before] * 3


@needs_gpu
@pytest.mark.parametrize("shape", [(32, 64, 32, 32), (32, 256)])
def test_kernels_in_a_graph(kernels: ModuleType, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    norm = filled(Norm(shape[1])).to(DEVICE)
    norm.groups, norm.fused = 2, True
    eager = copy.deepcopy(norm)
    x, residual, dy = (noise(*shape).to(torch.bfloat16) for _ in range(3))
    x.requires_grad_()

    def step(norm: Norm) -> list[Tensor]:
        y = norm(x, residual, relu=True)
        return [y, *torch.autograd.grad(y, [x, norm.weight, norm.bias], dy)]

    step(copy.deepcopy(norm))  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(norm)
    for _ in range(3):
        graph.replay()
        expected = step(eager)
    for found, wanted in zip(captured, expected, strict=True):
        assert torch.equal(found, wanted)
    assert torch.equal(norm.running_mean, eager.running_mean)
    assert torch.equal(norm.running_var, eager.running_var)
