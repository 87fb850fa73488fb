from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedu2.experiment import Experiment
from fedu2.federation.batches import batches_in_epoch, local_batches, sizes_of, steps_of
from fedu2.federation.optimizers import PlainSGD, learning_rate, make_optimizer, restart


def _experiment(**values: object) -> Experiment:
    return Experiment.parse({"batch_size": 8, "local_epochs": 2, **values})


@pytest.mark.parametrize(
    ("last_batch", "counts"),
    [("drop", [1, 1, 1, 2, 2]), ("keep", [1, 1, 1, 2, 3]), ("fill", [1, 1, 2, 2, 3])],
)
def test_batches_in_an_epoch(last_batch: str, counts: list[int]) -> None:
    sizes = [3, 8, 9, 16, 18]  # smaller than a batch, one batch, one image over, two batches, two over
    assert [batches_in_epoch(n, _experiment(last_batch=last_batch)) for n in sizes] == counts


@given(n=st.integers(2, 60), last_batch=st.sampled_from(["drop", "keep", "fill"]), seed=st.integers(0, 9))
def test_an_epoch_sees_each_image_at_most_once_unless_filled(n: int, last_batch: str, seed: int) -> None:
    experiment = _experiment(last_batch=last_batch)
    share = torch.arange(100, 100 + n)
    count = batches_in_epoch(n, experiment)
    batches = list(local_batches(share, count, experiment, torch.Generator().manual_seed(seed)))
    assert len(batches) == count
    seen = torch.cat(batches).tolist()
    assert set(seen) <= set(share.tolist())
    assert all(len(batch) > 1 and len(set(batch.tolist())) == len(batch) for batch in batches)
    if last_batch == "fill":
        assert set(seen) == set(share.tolist())
        assert all(len(batch) == min(n, 8) for batch in batches)
    else:
        assert len(set(seen)) == len(seen)
        lost = n - len(seen)
        assert lost == (0 if n <= 8 else n % 8 if last_batch == "drop" else int(n % 8 == 1))


def test_a_filled_batch_is_topped_up_from_the_epochs_beginning() -> None:
    first, second = local_batches(torch.arange(12), 2, _experiment(last_batch="fill"), torch.Generator().manual_seed(0))
    assert second[4:].tolist() == first[:4].tolist()


def test_epochs_have_fresh_orders() -> None:
    experiment = _experiment()
    batches = list(local_batches(torch.arange(8), 2, experiment, torch.Generator().manual_seed(0)))
    assert sorted(batches[0].tolist()) == sorted(batches[1].tolist())
    assert batches[0].tolist() != batches[1].tolist()


@pytest.mark.parametrize(
    ("examples", "last_batch", "sizes"),
    [(3, "keep", [3]), (8, "keep", [8]), (21, "keep", [8, 5]), (17, "keep", [8]), (21, "drop", [8]), (21, "fill", [8])],
)
def test_sizes_are_those_of_the_batches(examples: int, last_batch: str, sizes: list[int]) -> None:
    experiment = Experiment.parse({"batch_size": 8, "last_batch": last_batch})
    batches = local_batches(torch.arange(examples), 9, experiment, torch.Generator())
    assert sizes_of(examples, experiment) == sizes == sorted({len(batch) for batch in batches}, reverse=True)


def test_steps() -> None:
    sizes = [80, 16, 4]
    assert steps_of(sizes, _experiment()) == [20, 4, 2]
    assert steps_of(sizes, _experiment(local_steps="equal")) == [20, 20, 10]  # the last is held at ten passes
    assert steps_of(sizes, _experiment(local_steps=7)) == [7, 7, 7]
    many = _experiment(local_steps="equal", local_epochs=12)  # the cap never takes passes away
    assert steps_of([80, 80], many) == [120, 120]


def test_exact_steps_wrap_over_epochs() -> None:
    batches = list(local_batches(torch.arange(16), 5, _experiment(), torch.Generator().manual_seed(0)))
    assert len(batches) == 5
    assert sorted(torch.cat(batches[2:4]).tolist()) == list(range(16))


def test_learning_rate_over_rounds() -> None:
    cosine = Experiment.parse({"rounds": 4, "optimizer.lr": 0.2, "optimizer.schedule": "cosine"})
    assert learning_rate(cosine, 1) == pytest.approx(0.2)
    assert learning_rate(cosine, 3) == pytest.approx(0.1)
    assert learning_rate(Experiment.parse({"optimizer.lr": 0.2}), 3) == 0.2


@pytest.mark.parametrize("name", ["sgd", "adam", "adamw"])
def test_optimizers_by_name(name: str) -> None:
    options = Experiment.parse({"optimizer.name": name, "optimizer.lr": 0.1, "optimizer.weight_decay": 0.01}).optimizer
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = make_optimizer(parameter, options)
    parameter.grad = torch.zeros(2)
    optimizer.step()
    # No gradient: decoupled decay shrinks by lr · wd, Adam normalises the decay to a step of lr.
    shrunk = {"sgd": 1 - 0.1 * 0.01, "adam": 1 - 0.1, "adamw": 1 - 0.1 * 0.01}[name]
    assert torch.allclose(parameter, torch.tensor(shrunk), atol=1e-5)
    assert isinstance(optimizer, torch.optim.AdamW) == (name == "adamw")


@pytest.mark.parametrize(("momentum", "weight_decay"), [(0.9, 5e-4), (0.9, 0.0), (0.0, 0.1)])
def test_plain_sgd_has_the_bits_of_torchs(momentum: float, weight_decay: float) -> None:
    """Also where a learning rate changes, and where it begins anew in the middle, as with every client."""
    start, generator = torch.randn(1000, generator=torch.Generator().manual_seed(1)), torch.Generator().manual_seed(2)
    ours, torchs = (torch.nn.Parameter(start.clone()) for _ in range(2))
    settings = {"lr": 0.1, "momentum": momentum, "weight_decay": weight_decay}
    plain = PlainSGD(ours, **settings)
    for lr in (0.1, 0.03):
        restart(plain, lr)
        fresh = torch.optim.SGD([torchs], **{**settings, "lr": lr})
        for _ in range(4):
            ours.grad = torch.randn(1000, generator=generator)
            torchs.grad = ours.grad.clone()
            plain.step()
            fresh.step()
            assert torch.equal(ours, torchs)
    assert not torch.equal(ours, start)


@pytest.mark.parametrize("name", ["sgd", "adam", "adamw"])
def test_a_restarted_optimizer_is_a_fresh_one(name: str) -> None:
    options = Experiment.parse({"optimizer.name": name, "optimizer.lr": 0.1, "optimizer.weight_decay": 0.01}).optimizer

    def trained(past: int) -> torch.Tensor:
        parameter = torch.nn.Parameter(torch.ones(3))
        optimizer = make_optimizer(parameter, options)
        generator = torch.Generator().manual_seed(past)
        for _ in range(past):
            parameter.grad = torch.randn(3, generator=generator)
            optimizer.step()
        restart(optimizer, 0.05)
        parameter.data.fill_(1)
        generator.manual_seed(0)
        for _ in range(3):
            parameter.grad = torch.randn(3, generator=generator)
            optimizer.step()
        return parameter.detach()

    assert torch.equal(trained(past=4), trained(past=0))
