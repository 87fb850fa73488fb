from __future__ import annotations

import pytest
import torch
from torch import nn

from fedu2.errors import UsageError
from fedu2.experiment import Experiment
from fedu2.models import build_encoder
from fedu2.models.flat import FlatModel, Layout, ModelState
from fedu2.objectives import objectives


def _byol() -> FlatModel:
    return FlatModel(objectives["byol"](build_encoder("tiny", 4), Experiment()))


def test_parameters_are_views_into_one_vector() -> None:
    model = _byol()
    assert model.params.numel() == sum(p.numel() for p in model.module.parameters())
    model.params.fill_(2.0)
    assert all(bool((p == 2).all()) for p in model.module.parameters())
    model.buffers.fill_(3.0)
    assert all(bool((b == 3).all()) for b in model.module.buffers())


def test_flattening_does_not_change_what_the_model_computes() -> None:
    torch.manual_seed(0)
    module = objectives["simclr"](build_encoder("tiny", 4), Experiment())
    x = torch.randn(5, 3, 16, 16)
    module.eval()
    before = module.encoder(x)
    values = [parameter.detach().clone() for parameter in module.parameters()]
    FlatModel(module)
    assert all(torch.equal(a, b) for a, b in zip(module.parameters(), values, strict=True))
    # Kernels lie in another order then, for which some CPUs have another convolution, which rounds differently.
    torch.testing.assert_close(module.encoder(x), before, rtol=1e-5, atol=1e-6)


def test_gradients_arrive_in_one_vector_and_steps_act_on_it() -> None:
    torch.manual_seed(0)
    model = _byol()
    x1, x2 = torch.randn(4, 3, 16, 16), torch.randn(4, 3, 16, 16)
    gradients = model.gradients()
    assert [p for p, _ in gradients] == [p for p in model.module.parameters() if p.requires_grad]
    expected = torch.autograd.grad(model.module(x1, x2).loss, [parameter for parameter, _ in gradients])
    for parameter, gradient in gradients:
        parameter.grad = gradient
    model.module(x1, x2).loss.backward()
    assert all(torch.allclose(view, e, atol=1e-7) for (_, view), e in zip(gradients, expected, strict=True))
    flat = model.trained.grad
    assert float(flat.square().sum()) == pytest.approx(sum(float(e.square().sum()) for e in expected), rel=1e-5)
    before, target = model.params.clone(), model.section("target").params.clone()
    torch.optim.SGD([model.trained], lr=0.5).step()
    n = len(model.trained)
    assert torch.allclose(model.params[:n], before[:n] - 0.5 * flat)
    assert torch.equal(model.section("target").params, target)


def test_trained_sections_come_first_and_prefixes_leave_the_target_out() -> None:
    model = _byol()
    sections = list(dict.fromkeys(entry.section for entry in model.layout.entries))
    assert sections == ["encoder", "projector", "predictor", "target"]
    assert model.layout.prefix(["target"]).size == len(model.trained)
    with pytest.raises(UsageError, match="must come last"):
        model.layout.prefix(["projector"])


def test_load_and_state_are_inverse_and_copies() -> None:
    model = _byol()
    state = model.state(10, 4)
    model.params.zero_()
    assert state.params.abs().sum() > 0
    model.load(state)
    assert torch.equal(model.params[:10], state.params)
    assert model.params[10:].abs().sum() == 0
    model.load(ModelState(torch.ones(3), torch.ones(2)))
    assert torch.equal(model.params[:3], torch.ones(3))


def test_batch_norm_statistics_still_move() -> None:
    model = _byol()
    before = model.buffers.clone()
    model.module(torch.randn(4, 3, 16, 16), torch.randn(4, 3, 16, 16))
    assert not torch.equal(before, model.buffers)


def test_a_section_trained_in_part_is_refused() -> None:
    module = nn.Module()
    module.part = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    module.part[0].requires_grad_(False)
    with pytest.raises(UsageError, match="trained only in part"):
        FlatModel(module)


KERNEL, LINEAR = torch.arange(36.0).reshape(2, 2, 3, 3), torch.arange(6.0).reshape(2, 3)


def test_named_tensors_and_their_vector_are_inverse() -> None:
    named = {"a.kernel": KERNEL, "a.linear": LINEAR}
    layout = Layout.of(named.items())
    vector = layout.vector(named, "cpu")
    assert vector[:6].tolist() == [0, 9, 1, 10, 2, 11]  # of the first kernel, both inputs at each place
    assert all(torch.equal(view, named[name]) for name, view in layout.views(vector))
    assert torch.equal(layout.vector({**named, "a.linear": LINEAR.to(torch.float16)}, "cpu"), vector)


@pytest.mark.parametrize(
    ("wrong", "complaint"),
    [
        ({"a.kernel": KERNEL.permute(2, 3, 0, 1)}, r"'a\.kernel' is torch\.float32 \(3, 3, 2, 2\) in place of"),
        ({"a.kernel": KERNEL.flatten()}, r"'a\.kernel' is torch\.float32 \(36,\) in place of"),
        ({"a.linear": LINEAR.T}, r"'a\.linear' is .* in place of floating point \(2, 3\)"),
        ({"a.linear": LINEAR[:1]}, r"'a\.linear' is .* \(1, 3\)"),  # would be broadcast
        ({"a.linear": LINEAR.long()}, r"'a\.linear' is torch\.int64 \(2, 3\)"),
        ({"a.linear": LINEAR.to(torch.complex64)}, r"'a\.linear' is torch\.complex64"),
    ],
)
def test_tensors_of_other_shapes_and_types_are_refused_by_name(wrong: dict[str, torch.Tensor], complaint: str) -> None:
    named = {"a.kernel": KERNEL, "a.linear": LINEAR}
    with pytest.raises(ValueError, match=complaint):
        Layout.of(named.items()).vector({**named, **wrong}, "cpu")
