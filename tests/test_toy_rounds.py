"""One round of every method on three parameters, against numbers worked out by hand.

Colours are bytes; an encoder sees (x/255 − ½)/¼, so that byte 255 is +2, byte 0 is −2 and 127.5 would be 0. With
θ = 0, learning rate ½ and one step of gradient descent on ½‖θ − c‖², a client ends at c/2.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from fedu2.experiment import Experiment
from fedu2.federation.callbacks import Callback
from fedu2.federation.local import LocalBackend
from fedu2.methods import Task, methods
from fedu2.objectives import Outcome
from fedu2.options import FUROptions
from fedu2.regularizers import fur, sphere_points
from fedu2.regularizers.term import FUR, weight_at
from fedu2.seeds import generator
from fedu2.views import RECIPES, two_views
from toy import colours, play

RED, GREEN = (255, 0, 0), (0, 255, 0)  # c = (2, −2, −2) and (−2, 2, −2)


def _method(name: str, **values: object):
    settings = {
        "objective": "toy",
        "aggregator": methods[name].aggregator,
        "views.recipe": "none",
        "optimizer.name": "sgd",
        "optimizer.momentum": 0.0,
        "optimizer.weight_decay": 0.0,
        "optimizer.lr": 0.5,
        "local_steps": 1,
        "batch_size": 4,
        "method": name,
        "fur.weight": 0.0,
        "eua.guard": None,
    }
    return methods[name].build(Experiment.parse({**settings, **values}))


@pytest.mark.parametrize("name", ["fedsimclr", "fedsimsiam", "fedbyol"])
def test_plain_methods_average_by_data_size(name: str) -> None:
    images, shares = colours((6, RED), (2, GREEN))
    state, (record,) = play(_method(name), images, shares)
    # ¾ (1, −1, −1) + ¼ (−1, 1, −1)
    assert torch.allclose(state.server.model.params, torch.tensor([0.5, -0.5, -1.0]), atol=1e-6)
    assert record["fedavg.weights"] == [0.75, 0.25]
    assert record["loss"] == pytest.approx(6.0, rel=1e-5)  # ½ · 3 · 2²


def test_uniform_client_weights() -> None:
    images, shares = colours((6, RED), (2, GREEN))
    state, _ = play(_method("fedbyol", client_weights="uniform"), images, shares)
    assert torch.allclose(state.server.model.params, torch.tensor([0.0, 0.0, -1.0]), atol=1e-6)


def test_fedu2_unifies_two_clients() -> None:
    # Δ_A = (1, −1, −1) and Δ_B = (−1, 1, −1) have equal norms: p = (½, ½) whatever the data sizes.
    images, shares = colours((6, RED), (2, GREEN))
    state, (record,) = play(_method("fedu2"), images, shares)
    assert torch.allclose(state.server.model.params, torch.tensor([0.0, 0.0, -1.0]), atol=1e-6)
    assert record["eua.weights"] == pytest.approx([0.5, 0.5])
    # d = (0, 0, −1) as a step, so u falls at 2⟨Δ_k, step⟩/‖Δ_k‖² = 2 · 1/3 for both: Theorem 1.
    assert record["eua.rates"] == pytest.approx([2 / 3, 2 / 3])


def test_fedu2_guard_bounds_the_small_client() -> None:
    # One image in nine: at most 1.5 · 1/9 = 1/6 of the weight, where EUA alone would give ½.
    images, shares = colours((8, RED), (1, GREEN))
    with_guard = _method("fedu2", **{"eua.guard": 1.5, "batch_size": 8})
    state, (record,) = play(with_guard, images, shares)
    assert record["eua.weights"] == pytest.approx([5 / 6, 1 / 6])
    assert torch.allclose(state.server.model.params, torch.tensor([4 / 6, -4 / 6, -1.0]), atol=1e-6)


def test_fedu2_without_eua_is_fedavg() -> None:
    images, shares = colours((6, RED), (2, GREEN))
    state, _ = play(_method("fedu2", aggregator="fedavg"), images, shares)
    assert torch.allclose(state.server.model.params, torch.tensor([0.5, -0.5, -1.0]), atol=1e-6)


def test_fedu2_fur_pulls_toward_its_reference() -> None:
    """Four equal projections z = e1 and one reference s: the plan has a closed form.

    By symmetry π_i = t minimises N C t + N τ_a/2 (t − 1)² + τ_b/2 (N t − 1)², so t = (τ_a + τ_b − C)/(τ_a + N τ_b).
    ℓ_u = that value / N; its gradient on every z_i is −t s/N, on the sphere without the part along z. θ is all four
    z_i in both views, so each view adds −λ t (s − ⟨s, e1⟩ e1) to the gradient of the loss (‖θ‖ = 1).
    """
    weight, tau_a, tau_b, n = 0.3, 0.9, 0.7, 4
    images, shares = colours((n, (255, 255, 255)))  # c = (2, 2, 2)
    method = _method(
        "fedu2",
        **{
            "objective": "toy-at-e1",
            "fur.weight": weight,
            "fur.gradient": "plan",
            "fur.references": 1,
            "fur.solver": "exact",
            "fur.tau_a": tau_a,
            "fur.tau_b": tau_b,
            "aggregator": "fedavg",
        },
    )
    state, (record,) = play(method, images, shares)
    noise = generator("cpu", 0, "noise", 1, 0)
    two_views(images.images, RECIPES["none"], noise)  # the views are drawn first
    first, second = sphere_points((2, 1, 3), noise)[:, 0]
    e1 = torch.tensor([1.0, 0.0, 0.0])
    step, losses = e1 - torch.tensor([2.0, 2.0, 2.0]), []  # ∂ℓ_a
    for s in (first, second):
        cost = 1 - float(s @ e1)
        t = max(0.0, (tau_a + tau_b - cost) / (tau_a + n * tau_b))
        step = step - weight * t * (s - (s @ e1) * e1)
        losses.append(cost * t + tau_a / 2 * (t - 1) ** 2 + tau_b / 2 * (n * t - 1) ** 2 / n)
    assert torch.allclose(state.server.model.params, e1 - 0.5 * step, atol=1e-5)
    assert record["fur.loss"] == pytest.approx(sum(losses) / 2, rel=1e-5)
    assert record["loss"] == pytest.approx(record["align"] + weight * sum(losses), rel=1e-5)


def test_local_target_stays_and_shared_target_travels() -> None:
    """θ: 0 → ½ → ¾ of c for one client; the target follows half-way: ¼ c, then (¼ + ¾)/2 = ½ c."""
    images, shares = colours((4, RED))
    c = torch.tensor([2.0, -2.0, -2.0])
    local = replace(_method("fedbyol", objective="toy-target"), stays=("target",))
    state, _ = play(local, images, shares, rounds=2)
    assert state.server.model.params.shape == (3,)  # θ alone travels
    assert torch.allclose(state.server.model.params, 0.75 * c, atol=1e-6)
    assert torch.allclose(state.memories[0]["target.params"], 0.5 * c, atol=1e-6)

    shared, _ = play(_method("fedbyol", objective="toy-target"), images, shares, rounds=2)
    assert torch.allclose(shared.server.model.params, torch.cat([0.75 * c, 0.5 * c]), atol=1e-6)
    assert shared.memories == {}


def test_a_fresh_target_begins_every_round_with_what_was_sent() -> None:
    """θ: 0 → ½ → ¾ of c; the target of round 2 begins at ½ c, not at the ¼ c that it had, and follows to ⅝ c."""
    images, shares = colours((4, RED))
    c = torch.tensor([2.0, -2.0, -2.0])
    fresh = replace(_method("fedbyol", **{"objective": "toy-target", "byol.target": "fresh"}), stays=("target",))
    state, _ = play(fresh, images, shares)
    backend = LocalBackend(fresh, images, shares)
    (reply,) = backend.run([Task(2, 0, 1, 0.5, 0.5)], state.server, state.memories, Callback())
    assert state.memories == {}
    assert reply.memory == {}
    assert torch.allclose(reply.model.params, 0.75 * c, atol=1e-6)  # θ alone travels
    assert torch.allclose(backend.lanes[0].model.section("target").params, 0.625 * c, atol=1e-6)


def test_two_clients_keep_targets_of_their_own() -> None:
    images, shares = colours((4, RED), (4, GREEN))
    local = replace(_method("fedbyol", objective="toy-target"), stays=("target",))
    state, _ = play(local, images, shares)
    assert torch.allclose(state.memories[0]["target.params"], torch.tensor([0.5, -0.5, -0.5]), atol=1e-6)
    assert torch.allclose(state.memories[1]["target.params"], torch.tensor([-0.5, 0.5, -0.5]), atol=1e-6)


def test_cosine_schedule_and_momentum_by_hand() -> None:
    # Rates ½ and ¼ over two rounds; the optimizer starts afresh in each: c/2, then c/2 + ¼ · c/2.
    images, shares = colours((4, RED))
    scheduled = _method("fedbyol", **{"optimizer.schedule": "cosine", "rounds": 2, "optimizer.momentum": 0.9})
    state, records = play(scheduled, images, shares, rounds=2)
    assert [record["lr"] for record in records] == pytest.approx([0.5, 0.25])
    assert torch.allclose(state.server.model.params, torch.tensor([2.0, -2.0, -2.0]) * (0.5 + 0.125), atol=1e-6)


def test_adam_takes_a_step_of_the_learning_rate() -> None:
    images, shares = colours((4, RED))
    state, _ = play(_method("fedbyol", **{"optimizer.name": "adam"}), images, shares)
    assert torch.allclose(state.server.model.params, torch.tensor([0.5, -0.5, -0.5]), atol=1e-6)
    assert math.isfinite(float(state.server.model.params.sum()))


def test_momentum_schedule_reaches_the_target() -> None:
    """Two rounds, m = ½ rising by the cosine: ½ in the first, ¾ in the second.

    One client with BYOL's own update on θ = 0 → c/2 → 3c/4: the target is c/4, then ¾ · c/4 + ¼ · 3c/4 = 3c/8.
    """
    images, shares = colours((4, RED))
    scheduled = _method(
        "fedbyol",
        **{"objective": "toy-scheduled", "rounds": 2, "byol.momentum": 0.5, "byol.momentum_schedule": "cosine"},
    )
    state, _ = play(scheduled, images, shares, rounds=2)
    c = torch.tensor([2.0, -2.0, -2.0])
    assert torch.allclose(state.server.model.params, torch.cat([0.75 * c, 0.375 * c]), atol=1e-6)


def test_fur_acts_on_the_chosen_output() -> None:
    outcome = Outcome(torch.zeros(()), (torch.randn(8, 5),) * 2, (torch.randn(8, 3),) * 2)
    for output, views in (("encoder", outcome.features), ("projector", outcome.projections)):
        options = FUROptions(output=output, weight=0.5)
        term, logged = FUR(options)(outcome, torch.Generator().manual_seed(0), torch.zeros(()))
        expected = fur(torch.stack(views), torch.Generator().manual_seed(0), options)
        assert torch.allclose(term, 0.5 * expected.loss.sum())
        assert torch.allclose(logged["fur.mass"], expected.mass.mean())


@pytest.mark.parametrize(
    ("schedule", "until", "factors"),
    [("constant", 1.0, [1, 1, 1]), ("cosine", 1.0, [1, 0.5, 0.25]), ("cosine", 0.6, [1, 0.5 - 3**0.5 / 4, 0])],
)
def test_the_weight_of_fur_can_fall_over_rounds(schedule: str, until: float, factors: list[float]) -> None:
    outcome = Outcome(torch.zeros(()), (torch.randn(8, 5),) * 2, (torch.randn(8, 3),) * 2)
    options = FUROptions(weight=2.0, schedule=schedule, until=until)
    expected = fur(torch.stack(outcome.projections), torch.Generator().manual_seed(0), options).loss.sum()
    for progress, factor in zip((0.0, 0.5, 2 / 3), factors, strict=True):
        term, logged = FUR(options)(outcome, torch.Generator().manual_seed(0), torch.tensor(progress))
        assert torch.allclose(term, 2 * factor * expected, atol=1e-6)
        assert float(logged.get("fur.weight", 2.0)) == pytest.approx(2 * factor, abs=1e-6)


def test_a_round_tells_fur_how_far_the_run_is() -> None:
    """Two rounds of one client: by its cosine the weight is λ_U in the first, and half of it in the second."""
    images, shares = colours((4, RED))
    settings = {"objective": "toy", "rounds": 2}
    seen: list[float] = []

    def watching(outcome: Outcome, generator: torch.Generator, progress: torch.Tensor) -> tuple[torch.Tensor, dict]:
        seen.append(float(weight_at(FUROptions(weight=2.0, schedule="cosine", until=1), progress)))
        return outcome.loss.new_zeros(()), {}

    play(replace(_method("fedu2", **settings), regularizers=(watching,)), images, shares, rounds=2)
    assert sorted(set(seen), reverse=True) == pytest.approx([2.0, 1.0])
