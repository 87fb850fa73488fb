"""L-DAWA against hand-worked numbers and a loop over named tensors."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fedu2.aggregators import Aggregate, Buffers, Updates
from fedu2.aggregators.fedavg import fedavg
from fedu2.aggregators.ldawa import ldawa
from fedu2.experiment import Experiment
from fedu2.federation.rounds import initial_state
from fedu2.methods import build, resolve
from fedu2.models.flat import Layout
from fedu2.options import LDAWAOptions

SHARES = torch.tensor([0.75, 0.25], dtype=torch.float64)


def _layout(**sizes: int) -> Layout:
    return Layout.of((name, torch.empty(size)) for name, size in sizes.items())


def _aggregate(start: Tensor, clients: Tensor, layout: Layout, **options: object) -> Aggregate:
    round_ = options.pop("round", 1)
    updates = Updates(start, clients.clone(), SHARES, layout=layout, round=round_)  # type: ignore[arg-type]
    return ldawa(LDAWAOptions(**options))(updates)  # type: ignore[arg-type]


# Tensor a: client 0 stands at 60° to the server's, client 1 is parallel. Tensor b: both are parallel, of other lengths.
START = torch.tensor([2.0, 0.0, 0.0, 3.0])
CLIENTS = torch.tensor([[1.0, 3.0**0.5, 0.0, 1.0], [5.0, 0.0, 0.0, 2.0]])
LAYOUT = _layout(a=2, b=2)


def test_by_hand() -> None:
    result = _aggregate(START, CLIENTS, LAYOUT)
    # a: ½ (½ (1, √3) + 1 (5, 0)),  b: ½ ((0, 1) + (0, 2)): data shares play no part
    expected = torch.tensor([2.75, 3.0**0.5 / 4, 0.0, 1.5])
    assert torch.allclose(result.params, expected, atol=1e-6)
    assert result.metrics["cosines"] == pytest.approx([0.75, 1.0])
    assert result.metrics["smallest"] == pytest.approx(0.5)


def test_by_hand_renormalized() -> None:
    result = _aggregate(START, CLIENTS, LAYOUT, renormalize=True)
    expected = torch.tensor([(0.5 * 1 + 5) / 1.5, 0.5 * 3.0**0.5 / 1.5, 0.0, 1.5])
    assert torch.allclose(result.params, expected, atol=1e-6)


def test_by_hand_one_cosine_for_the_model() -> None:
    # ⟨θ_0, θ_g⟩ = 2 + 3 = 5, norms √(1+3+1) = √5 and √13; client 1: 10 + 6 = 16, √29 and √13
    first, second = 5 / (5 * 13) ** 0.5, 16 / (29 * 13) ** 0.5
    result = _aggregate(START, CLIENTS, LAYOUT, level="model")
    assert torch.allclose(result.params, (first * CLIENTS[0] + second * CLIENTS[1]) / 2, atol=1e-6)
    divided = _aggregate(START, CLIENTS, LAYOUT, level="model", renormalize=True)
    assert torch.allclose(divided.params, (first * CLIENTS[0] + second * CLIENTS[1]) / (first + second), atol=1e-6)


@pytest.mark.parametrize("level", ["tensor", "model"])
@pytest.mark.parametrize("renormalize", [False, True])
def test_clients_that_did_not_move_change_nothing(level: str, renormalize: bool) -> None:
    start = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    layout = _layout(**{f"t{i}": 100 for i in range(10)})
    result = _aggregate(start, start.repeat(2, 1), layout, level=level, renormalize=renormalize)
    assert torch.equal(result.params, start)


def test_warm_up_is_fedavg() -> None:
    plain = fedavg(Updates(START, CLIENTS.clone(), SHARES)).params
    for round_ in (1, 2, 3):
        assert torch.equal(_aggregate(START, CLIENTS, LAYOUT, warm_up=3, round=round_).params, plain)
    after = _aggregate(START, CLIENTS, LAYOUT, warm_up=3, round=4).params
    assert torch.equal(after, _aggregate(START, CLIENTS, LAYOUT).params)
    assert not torch.equal(after, plain)


def test_tensors_without_an_angle_are_averaged_plainly() -> None:
    start = torch.tensor([0.0, 0.0, 1.0, 1.0])  # a fresh bias
    clients = torch.tensor([[4.0, 2.0, 0.0, 0.0], [2.0, 0.0, 1.0, 1.0]])
    result = _aggregate(start, clients, LAYOUT)
    assert torch.allclose(result.params, torch.tensor([3.0, 1.0, 0.5, 0.5]))


def test_opposed_clients_are_not_divided_by_zero() -> None:
    clients = torch.stack([START, -START])
    assert torch.allclose(_aggregate(START, clients, LAYOUT).params, START)  # −1 · −θ: as published, not clamped
    assert _aggregate(START, clients, LAYOUT, renormalize=True).params.isfinite().all()


def _by_loop(start: dict[str, Tensor], clients: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    new = {}
    for name, before in start.items():
        total = torch.zeros_like(before, dtype=torch.float64)
        for client in clients:
            a, b = client[name].double().flatten(), before.double().flatten()
            cosine = 1.0 if a.norm() == 0 or b.norm() == 0 else min(float(a @ b / (a.norm() * b.norm())), 1.0)
            total += cosine * client[name].double() / len(clients)
        new[name] = total.float()
    return new


def test_a_whole_model_with_its_buffers_against_a_loop(micro: Experiment) -> None:
    experiment = resolve(Experiment.parse(micro.flat(), ["method=ldawa", "objective=byol"]))
    method = build(experiment)
    server = initial_state(method, "cpu").server
    layout, buffer_layout = method.layouts
    noise = torch.Generator().manual_seed(1)
    params = server.model.params + 0.1 * torch.randn(3, layout.size, generator=noise)
    buffers = server.model.buffers + torch.rand(3, buffer_layout.size, generator=noise)
    shares = torch.full((3,), 1 / 3, dtype=torch.float64)
    beside = Buffers(server.model.buffers, buffers, buffer_layout)
    after, logged = method.aggregate(server, Updates(server.model.params, params, shares, beside, layout), [{}] * 3)
    for new, before, rows, places in (
        (after.model.params, server.model.params, params, layout),
        (after.model.buffers, server.model.buffers, buffers, buffer_layout),
    ):
        expected = _by_loop(dict(places.views(before)), [dict(places.views(row)) for row in rows])
        for name, tensor in places.views(new):
            assert torch.allclose(tensor, expected[name], atol=1e-6), name
    assert len(logged["cosines"]) == 3
    assert not any(entry.section == "target" for entry in layout.entries)
