"""The benchmark's opponent trains as it claims, counts what it trains on, and makes the views that fedu2 makes."""

from __future__ import annotations

import copy
import math
import random
from dataclasses import replace
from itertools import count, islice

import pytest
import torch
from benchmarks import ceilings, plain_loop
from benchmarks.plain_loop import (
    PillowView,
    TwoViews,
    build_model,
    fedavg,
    make_loader,
    measure,
    move_target,
    rounds,
    views_of,
)
from PIL import Image
from torch import Tensor

from fedu2.views import RECIPES, Recipe, plain_view, random_view

TINY = {"encoder": "tiny", "width": 4, "batch_size": 16, "epochs": 2, "transforms": "pillow"}


def some_images(number: int) -> Tensor:
    """Smooth colour fields, so that crops differ from one another less than images do."""
    coarse = torch.rand(number, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    smooth = torch.nn.functional.interpolate(coarse, size=(32, 32), mode="bicubic").clamp(0, 1)
    return (255 * smooth).to(torch.uint8)


def deal(*sizes: int) -> list[Tensor]:
    return list(torch.arange(sum(sizes)).split(sizes))


def tiny_rounds(sizes: tuple[int, ...], objective: str = "simclr") -> tuple[torch.nn.Module, object]:
    torch.manual_seed(0)
    server = build_model(objective, "tiny", 4)
    images = TwoViews(some_images(sum(sizes)), views_of(RECIPES[objective], 32, "pillow")[1])
    return server, rounds(server, images, deal(*sizes), batch_size=16, epochs=2, workers=0, rng=random.Random(0))


class TestLoop:
    def test_a_round_has_every_clients_whole_batches_and_skips_clients_without_one(self):
        _, loop = tiny_rounds((40, 15, 16))
        for _ in range(2):
            steps = list(islice(loop, 2 * 2 + 2 * 1))
            assert sorted(step.client for step in steps) == [0, 0, 0, 0, 2, 2]
            assert {step.samples for step in steps} == {16}
            assert all(math.isfinite(step.loss) for step in steps)

    def test_no_client_with_a_batch_is_an_error(self):
        _, loop = tiny_rounds((15, 3))
        with pytest.raises(ValueError, match="16 images"):
            next(loop)

    def test_the_server_becomes_the_mean_weighted_by_images(self, monkeypatch):
        server, loop = tiny_rounds((48, 16))
        seen = []

        def recorded(states, sizes):
            seen.append((copy.deepcopy(states), sizes))
            return fedavg(states, sizes)

        monkeypatch.setattr(plain_loop, "fedavg", recorded)
        before = copy.deepcopy(server.state_dict())
        list(islice(loop, 2 * 3 + 2 * 1))
        assert not seen
        for name, value in server.state_dict().items():
            assert torch.equal(value, before[name]), name  # clients train copies
        next(loop)  # belongs to the second round
        ((states, sizes),) = seen
        assert sorted(sizes) == [16, 48]
        for name, value in server.state_dict().items():
            expected = sum(size / 64 * state[name].double() for state, size in zip(states, sizes, strict=True))
            torch.testing.assert_close(value, expected.to(value.dtype), rtol=1e-5, atol=1e-7)

    def test_a_clients_loader_keeps_no_more_workers_than_its_epoch_has_batches(self):
        images = TwoViews(some_images(48), views_of(RECIPES["simclr"], 32, "pillow")[1])
        loader = make_loader(images, torch.arange(40), batch_size=16, workers=8, pin_memory=False)
        assert loader.num_workers == len(loader) == 2
        assert loader.persistent_workers

    def test_training_lowers_the_loss(self):
        _, loop = tiny_rounds((64,), objective="simsiam")
        losses = [step.loss for step in islice(loop, 64)]
        assert sum(losses[-8:]) < sum(losses[:8]) - 8 * 0.2


def test_fedavg_of_two_clients_is_the_weighted_mean():
    first = {"weight": torch.tensor([1.0, 4.0]), "batches": torch.tensor(3)}
    second = {"weight": torch.tensor([5.0, 0.0]), "batches": torch.tensor(7)}
    average = fedavg([first, second], [30, 10])
    assert average["weight"].tolist() == [2.0, 3.0]
    assert average["batches"] == 4
    assert average["batches"].dtype == torch.int64


def test_the_target_follows_encoder_and_projector():
    model = build_model("byol", "tiny", 4)
    torch.nn.init.normal_(model.encoder.stem[0].weight)
    expected = copy.deepcopy(model)
    move_target(model, 0.9)
    online = [*expected.encoder.parameters(), *expected.projector.parameters()]
    for moved, target, source in zip(model.target.parameters(), expected.target.parameters(), online, strict=True):
        torch.testing.assert_close(moved, 0.9 * target + 0.1 * source)
    assert not torch.equal(model.target[0].stem[0].weight, expected.target[0].stem[0].weight)


@pytest.mark.parametrize("objective", ["byol", "simclr", "simsiam"])
def test_the_networks_take_none_of_the_fast_paths(objective):
    model = build_model(objective, "resnet18", None)
    assert not getattr(model, "paired", False)
    assert all(getattr(module, "groups", 1) == 1 and not getattr(module, "fused", False) for module in model.modules())
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert [layer.weight.shape for layer in model.projector if hasattr(layer, "in_features")] == [
        (2048, 512),
        (512, 2048),
    ]


class TestMeasure:
    @pytest.mark.parametrize("objective", ["byol", "simclr", "simsiam"])
    def test_counts_what_the_clock_saw(self, objective, monkeypatch):
        ticks = count()
        monkeypatch.setattr(plain_loop, "perf_counter", lambda: float(next(ticks)))  # a step takes one second
        monkeypatch.setattr(plain_loop, "RESIDENT_STEPS", 2)
        # Three clients of two steps each: five steps warm up, seven count, from the last step of the first round on.
        found = measure(some_images(48), deal(16, 16, 16), objective, "cpu", 7.0, workers=0, **TINY)
        assert (found.samples, found.seconds) == (7 * 16, 7.0)
        assert found.samples_per_second == 16
        assert found.step_ms == found.gpu_only_step_ms == 1000
        assert found.clients_seen == 3
        assert found.change_ms == 1000
        assert math.isfinite(found.loss)
        assert found.transforms == "pillow"

    def test_with_workers_and_a_real_clock(self):
        found = measure(some_images(96), deal(64, 32), "byol", "cpu", 0.3, workers=2, **TINY)
        assert found.workers == 2
        assert found.seconds >= 0.3
        assert found.samples_per_second == pytest.approx(found.samples / found.seconds)
        assert found.step_ms == pytest.approx(1e3 * found.seconds * 16 / found.samples)
        assert found.gpu_only_step_ms > 0
        assert math.isfinite(found.loss)

    @pytest.mark.parametrize("setting", [True, False])
    def test_leaves_cudnn_as_it_was(self, setting, monkeypatch):
        monkeypatch.setattr(torch.backends.cudnn, "benchmark", setting)
        during = []
        monkeypatch.setattr(
            plain_loop, "resident_step_ms", lambda *_: during.append(torch.backends.cudnn.benchmark) or 1.0
        )
        measure(some_images(32), deal(32), "simclr", "cpu", 0.01, workers=0, **TINY)
        assert during == [True]
        assert torch.backends.cudnn.benchmark is setting


def views(recipe: Recipe, images: Tensor, transforms: str) -> Tensor:
    """One view of each image by the loop's transforms."""
    _, (view, _) = views_of((recipe, recipe), images.shape[-1], transforms)
    return torch.stack([view(Image.fromarray(image.permute(1, 2, 0).numpy())) for image in images])


class TestViews:
    def test_without_operations_an_image_is_only_normalised(self):
        images = some_images(3)
        assert torch.equal(views(Recipe(), images, "pillow"), plain_view(images))

    def test_flip_gray_and_solarise(self):
        images = some_images(3)
        plain = plain_view(images)
        assert torch.equal(views(Recipe(flip=1.0), images, "pillow"), plain.flip(-1))
        gray = views(Recipe(grayscale=1.0), images, "pillow")
        assert torch.equal(gray, gray[:, :1].expand_as(gray))
        solarised = views(Recipe(solarize=1.0), images, "pillow")
        inverted = torch.where(images < 128, images, 255 - images)
        assert torch.equal(solarised, plain_view(inverted))

    @pytest.mark.parametrize("transforms", ["pillow", "torchvision"])
    @pytest.mark.parametrize("recipe", [RECIPES["byol"][1], RECIPES["simsiam"][0]], ids=["byol", "simsiam"])
    def test_are_distributed_as_those_of_fedu2(self, recipe, transforms):
        if transforms == "torchvision":
            pytest.importorskip("torchvision")
        random.seed(0)
        torch.manual_seed(0)
        images = some_images(40).repeat(40, 1, 1, 1)
        plain_loops = views(recipe, images, transforms)
        ours = random_view(images, recipe, torch.Generator().manual_seed(0))
        for statistic in (
            lambda x: x.mean((1, 2, 3)),  # brightness, solarisation
            lambda x: x.std((1, 2, 3)),  # contrast
            lambda x: x.std(1).mean((1, 2)),  # saturation, grayscale
            lambda x: x.diff(dim=-1).abs().mean((1, 2, 3)),  # sizes of crops
        ):
            a, b = statistic(plain_loops), statistic(ours)
            error = ((a.var() + b.var()) / len(a)).sqrt()
            assert abs(a.mean() - b.mean()) < 4 * error + 0.02 * b.mean().abs()

    def test_hue_and_jitter_change_colours_only_when_drawn(self):
        images = some_images(8)
        turned = views(Recipe(jitter=1.0, hue=0.1), images, "pillow")
        assert not torch.allclose(turned, plain_view(images), atol=0.1)
        torch.testing.assert_close(turned.amax(1), plain_view(images).amax(1), atol=0.05, rtol=0)  # HSV's value stays
        still = replace(RECIPES["byol"][0], crop_scale=(1.0, 1.0), flip=0.0, jitter=0.0, grayscale=0.0)
        assert torch.equal(views(still, images, "pillow"), plain_view(images))

    @pytest.mark.parametrize("strength", ["brightness", "contrast", "saturation"])
    def test_each_strength_of_the_jitter_spreads_views_as_in_fedu2(self, strength):
        random.seed(0)
        images = some_images(1).repeat(400, 1, 1, 1)
        recipe = Recipe(jitter=1.0, **{strength: 0.4})
        ours = random_view(images, recipe, torch.Generator().manual_seed(0))
        spread = views(recipe, images, "pillow").std(0).mean()  # over draws
        assert spread == pytest.approx(float(ours.std(0).mean()), rel=0.15)

    def test_blur_is_refused(self):
        with pytest.raises(ValueError, match="blur"):
            views_of((Recipe(blur=0.5), Recipe()), 32)

    def test_two_views_of_an_image_differ(self):
        recipe = RECIPES["simclr"][0]
        first, second = TwoViews(some_images(1), (PillowView(recipe, 32), PillowView(recipe, 32)))[0]
        assert first.shape == second.shape == (3, 32, 32)
        assert not torch.equal(first, second)


class TestCeilings:
    def test_run_on_the_cpu(self):
        assert 0 < ceilings.matmul_ceiling("cpu", 64, torch.float32, repeats=3) < 100
        assert 0 < ceilings.copy_ceiling("cpu", 10**6, repeats=3) < 100

    def test_count_operations_and_bytes(self, monkeypatch):
        results = []

        def half_a_second(call, device, repeats):
            results.append(call())
            return 0.5

        monkeypatch.setattr(ceilings, "median_seconds", half_a_second)
        assert ceilings.matmul_ceiling("cpu", 50, torch.float32) == pytest.approx(2 * 2 * 50**3 / 1e12)
        assert ceilings.copy_ceiling("cpu", 1000) == pytest.approx(2 * 2 * 1000 / 1e12)
        product, copied = results
        assert product.shape == (50, 50)
        assert product.std() == pytest.approx(50**0.5, rel=0.2)  # random data, not zeros
        assert copied.float().std() > 50

    def test_median_of_repeats(self, monkeypatch):
        marks = iter([0.0, 1.0, 10.0, 13.0, 20.0, 22.0])
        monkeypatch.setattr(ceilings, "perf_counter", lambda: next(marks))
        calls = []
        assert ceilings.median_seconds(lambda: calls.append(1), "cpu", 3) == 2.0
        assert len(calls) == 3 + ceilings.WARM_UP
