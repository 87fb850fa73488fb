from __future__ import annotations

import pytest
import torch
from torch import nn

from fedu2.errors import UsageError
from fedu2.models import build_encoder, encoders, mlp
from fedu2.models.norm import Norm
from fedu2.models.resnet import Pointwise


def _parameters(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


@pytest.mark.parametrize(
    ("name", "features", "millions"),
    [("resnet10", 512, 4.90), ("resnet18", 512, 11.17), ("resnet34", 512, 21.28), ("resnet50", 2048, 23.50)],
)
def test_resnets_have_the_known_sizes(name: str, features: int, millions: float) -> None:
    encoder = build_encoder(name)
    assert encoder.features == features
    assert _parameters(encoder) / 1e6 == pytest.approx(millions, abs=0.005)


def test_resnet18_has_exactly_the_papers_parameters() -> None:
    assert _parameters(build_encoder("resnet18")) == 11_168_832


@pytest.mark.parametrize("name", ["tiny", "resnet10", "resnet18", "resnet34", "resnet50"])
@pytest.mark.parametrize("size", [32, 40])
def test_width_and_image_size(name: str, size: int) -> None:
    encoder = build_encoder(name, width=4)
    features = encoder(torch.randn(2, 3, size, size))
    assert features.shape == (2, encoder.features)
    assert features.isfinite().all()


def test_resnet18_keeps_full_resolution_in_the_first_stage() -> None:
    encoder = build_encoder("resnet18", width=2)
    x = encoder.stem(torch.randn(1, 3, 32, 32))
    sizes = []
    for stage in encoder.stages:
        x = stage(x)
        sizes.append(tuple(x.shape[1:]))
    assert sizes == [(2, 32, 32), (4, 16, 16), (8, 8, 8), (16, 4, 4)]


@pytest.mark.parametrize("channels", [3, 4, 12, 16, 20])
@pytest.mark.parametrize("size", [15, 16])
def test_strided_shortcuts_have_the_right_gradients(channels: int, size: int) -> None:
    """Against a matrix product in double precision: oneDNN's kernel corrupts memory on some CPUs."""
    x = torch.randn(32, channels, size, size).to(memory_format=torch.channels_last).requires_grad_()
    conv = Pointwise(channels, 8, 1, 2, bias=False).to(memory_format=torch.channels_last)
    y = conv(x)
    upstream = torch.randn_like(y)
    y.backward(upstream)

    seen, weight = x.detach()[:, :, ::2, ::2].double(), conv.weight.detach()[:, :, 0, 0].double()
    torch.testing.assert_close(y.double(), torch.einsum("ncij,oc->noij", seen, weight), rtol=0, atol=1e-4)
    torch.testing.assert_close(
        conv.weight.grad[:, :, 0, 0].double(), torch.einsum("noij,ncij->oc", upstream.double(), seen), rtol=0, atol=1e-2
    )
    inner = torch.einsum("noij,oc->ncij", upstream.double(), weight)
    torch.testing.assert_close(x.grad[:, :, ::2, ::2].double(), inner, rtol=0, atol=1e-4)
    assert float(x.grad.square().sum()) == pytest.approx(float(inner.square().sum()), rel=1e-4)  # and 0 elsewhere


def test_head_is_the_papers_mlp() -> None:
    head = mlp(512, 2048, 512)
    assert [type(layer) for layer in head] == [nn.Linear, Norm, nn.ReLU, nn.Linear]
    assert head(torch.randn(4, 512)).shape == (4, 512)


def test_users_can_register_an_encoder() -> None:
    @encoders.register("test-linear")
    def linear(width: int | None) -> nn.Module:
        module = nn.Sequential(nn.Flatten(), nn.LazyLinear(width or 5))
        module.features = width or 5
        return module

    assert build_encoder("test-linear", 7)(torch.randn(2, 3, 8, 8)).shape == (2, 7)
    encoders.register("test-linear")(linear)  # a notebook cell run twice
    with pytest.raises(ValueError, match="is built in"):
        encoders.register("resnet18")(linear)


def test_an_encoder_without_features_is_refused() -> None:
    encoders.register("test-nameless")(lambda width: nn.Flatten())
    with pytest.raises(UsageError, match="attribute `features`"):
        build_encoder("test-nameless")


def test_unknown_encoder_suggests_the_nearest() -> None:
    with pytest.raises(UsageError, match="did you mean 'resnet18'"):
        build_encoder("resnet-18")
