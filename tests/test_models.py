from __future__ import annotations

import pytest
import torch
from torch import nn

from fedu2.errors import UsageError
from fedu2.models import build_encoder, encoders, mlp
from fedu2.models.norm import Norm


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
