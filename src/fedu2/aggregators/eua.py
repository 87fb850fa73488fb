"""EUA, the efficient unified aggregator of FedU² (CVPR 2024): a step on which all clients agree.

With the updates Δ_k = θ_k − θ_g, the deviations u_k = ‖θ_g − θ_k‖² and g_k = ∇log u_k = −2Δ_k/‖Δ_k‖², a step −d lowers
log u_k at the rate ⟨g_k, d⟩. The worst of these rates is largest along d = Σ p_k g_k, where p solves

    min_{p ∈ simplex} ‖Σ_k p_k g_k‖²,

and there they are equal for all clients with p_k > 0, and not smaller for the others (Theorem 1). A combination of the
g_k is one of the Δ_k: every form of EUA is a *direction* Σ w_kΔ_k, w convex with w_k ∝ p_k/‖Δ_k‖², and a *length*:

    convex       ‖Σ w_kΔ_k‖             the step is the convex combination itself, whatever the updates' scale
    fedavg_norm  ‖Σ share_kΔ_k‖         as long as FedAvg's step
    extrapolated e · ‖Σ w_kΔ_k‖         with e = Σ w_k‖Δ_k‖² / 2‖Σ w_kΔ_k‖², at least 1 and at most 4: clients that
                                        disagree cancel out one another, and the step makes up for it (FedExP)
    literal      ‖Σ p_k g_k‖ / φ        as printed, η_g = 1; since ‖g_k‖ = 2/‖Δ_k‖, η must fit the updates' scale
    unit         ‖Σ p_k v_k‖            as in the authors' code: v_k = 2Δ_k/‖Δ_k‖ replaces g_k, so w_k ∝ p_k/‖Δ_k‖;
                                        their η is 8

all of them times η, which is `server.lr`, 1 unless set (`fedu2.federation.server_step`).

**Rates by shares.** Updates of clients that have little in common are orthogonal, and then w is 1/K for each, whatever
it holds: a client of 17 images counts as much as one of 12,000. With `rates=shares` the worst of ⟨g_k, d⟩/(K share_k)
is made largest, that is, g_k/(K share_k) takes the place of g_k. Where all updates are orthogonal this is w = share,
FedAvg; for equal shares it is EUA as published; where updates conflict, the step still leans toward whoever would lose
most. A small update against the others still vetoes the step: it takes the guard below as before. The lengths of
literal and unit are those of this other problem, and unit has w_k ∝ share_k/‖Δ_k‖ where updates are orthogonal.

θ_k is what client k trains. A target network that travels has no part in w; it goes along with the same weights, and
never farther than the clients' targets (for the reason, see there).

**The guard.** The smaller an update, the larger its g_k, and what EUA makes of it hangs on a hair. Take K − 1 clients
with updates of one norm and mutual cosine ρ, whose mean has the squared norm κ = (1 + (K − 2)ρ)/(K − 1) relative to one
of them, and one client with an update r times as long that has the cosine c to each of theirs. It gets the weight

    w = (κ − c/r) / (κ − c/r + 1 − cr),   or 0 if c ≥ κr.

An orthogonal update gets κ/(1 + κ) = (1 + (K − 2)ρ)/(K + (K − 2)ρ), from 1/K to 1/2, however small it is (in the unit
form κ/(κ + r), which tends to 1). A tiny update *against* the others gets nearly all the weight and so vetoes the
step: an attack surface. And in a prototype on CIFAR-10 split over ten clients, the one with 17 of 50,000 images got the
largest weight in every form, 0.25 to 0.99.

Hence w_k is at most `guard` times the client's share of the data, and the excess goes to the others in proportion to
their own w. A short update counts less than that: with m the median length, w_k is at most

    share_k · min(guard, max(1, guard · ‖Δ_k‖/m)),

so a tiny one has no more weight than FedAvg gives it, whatever its direction; see docs/robustness.md.

FedExP is Jhunjhunwala et al.: Speeding up federated averaging via extrapolation, ICLR 2023; its e has no upper bound.

guard = 1 is FedAvg's direction (with `convex`, FedAvg itself), None is EUA as published; after the share `until` of all
rounds it is 1. The guard turns the direction;
literal and unit keep the length that they have without it, so redistribution cannot inflate it, but a veto still
shortens their steps: convex, extrapolated and fedavg_norm are the forms that the guard protects.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedu2.aggregators.base import (
    Aggregate,
    Aggregator,
    Updates,
    aggregators,
    gram,
    require_finite,
    weighted_sum,
)
from fedu2.aggregators.min_norm import min_norm_weights
from fedu2.experiment import Experiment
from fedu2.options import EUAOptions

__all__ = ["Unified", "eua", "guarded", "unify"]

# An update shorter than this share of the longest counts as none: its client agrees with θ_g already.
_NEGLIGIBLE = 1e-12
# ‖Σ w_kΔ_k‖² below this share of (Σ w_k‖Δ_k‖)² is rounding: the updates cancel and there is no direction.
_CANCELLED = 1e-14
# The most that a step is lengthened where clients disagree; without a bound, a few of them could send it anywhere.
_EXTRAPOLATION = 4.0


@dataclass(frozen=True, eq=False)
class Unified:
    """The step Σ_k scale · weights_k Δ_k, found from the inner products of the updates alone."""

    weights: Tensor  # (K,) w after the guard, Σ = 1
    min_norm: Tensor  # (K,) p, the solution of the min-norm problem; 0 for who has no part in it
    scale: float  # 1 for a convex combination
    rates: Tensor  # (K,) ⟨g_k, d⟩ for the step −d found here: the first-order relative fall of u_k; 0 for such
    residual: float  # of the min-norm problem, see `kkt_residual`


def eua(options: EUAOptions, rounds: int = 1) -> Aggregator:
    """EUA with these options in a run of so many rounds, which matters where `until` is less than 1.

    It overwrites `clients` with Δ; beyond that it holds the result and small blocks.
    """
    plain = options.model_copy(update={"guard": 1.0})

    def aggregate(updates: Updates) -> Aggregate:
        require_finite(updates.clients)
        deltas = updates.clients.sub_(updates.start)
        products = gram(deltas[:, : updates.trained])
        late = options.until < 1 and updates.round / rounds > options.until
        step = unify(products, updates.shares, plain if late else options)
        weights = step.scale * step.weights
        metrics = {
            "weights": step.weights.tolist(),
            "min_norm": step.min_norm.tolist(),
            "rates": step.rates.tolist(),
            "norms": products.diagonal().sqrt().tolist(),
            "clients": float(1 / step.weights.square().sum()),  # on how many, as it were, the step stands
            "scale": step.scale,
            "residual": step.residual,
        }
        buffer_weights = step.weights if options.buffers == "same" else updates.shares
        params = weighted_sum(weights, deltas, updates.start)
        if updates.trained is not None and step.scale > 1:
            target = slice(updates.trained, None)
            params[target] = weighted_sum(step.weights, deltas[:, target], updates.start[target])
        return Aggregate(params, weights, buffer_weights, metrics)

    return aggregate


@aggregators.register("eua")
def build(experiment: Experiment) -> Aggregator:
    """EUA with the options of the experiment's `eua` group."""
    return eua(experiment.eua, experiment.rounds)


def unify(products: Tensor, shares: Tensor, options: EUAOptions) -> Unified:
    """EUA's step from products[i, j] = ⟨Δ_i, Δ_j⟩, (K, K), and the clients' shares, (K,), both float64 on the CPU."""
    norms = products.diagonal().sqrt()
    moved = (norms > _NEGLIGIBLE * norms.max()) & ((options.rates == "equal") | (shares > 0))
    min_norm = torch.zeros_like(shares)
    if not bool(moved.any()):
        return Unified(shares, min_norm, 1.0, torch.zeros_like(shares), 0.0)

    # g_k = factor_k Δ_k; the sign of g_k drops out of the Gram matrix and is put back in the step.
    factor = 2 / norms[moved] if options.step == "unit" else 2 / norms[moved] ** 2
    if options.rates == "shares":
        factor = factor / (len(shares) * shares[moved])
    solution = min_norm_weights(products[moved][:, moved] * factor[:, None] * factor)
    min_norm[moved] = solution.weights
    weights = torch.zeros_like(shares)
    weights[moved] = solution.weights * factor
    weights = guarded(weights / weights.sum(), shares, _by_length(options.guard, norms))

    lengths = {
        "fedavg_norm": _norm(products, shares),
        "extrapolated": _extrapolation(products, weights) * _norm(products, weights),
        "literal": max(solution.value, 0.0) ** 0.5 / options.phi,
        "unit": max(solution.value, 0.0) ** 0.5,
    }
    scale = 1.0
    if options.step in lengths:
        length = _norm(products, weights)
        scale = lengths[options.step] / length if length > 0 else 0.0
    rates = torch.where(moved, 2 * scale * (products @ weights) / norms**2, 0.0)
    return Unified(weights, min_norm, scale, rates, solution.residual)


def guarded(weights: Tensor, shares: Tensor, guard: float | Tensor | None) -> Tensor:
    """Cap convex weights (K,) at guard · share, with one guard ≥ 1 for all or one for each, (K,).

    The excess goes to the others in proportion to their weights. Where those are all at their caps, the rest goes to
    clients of weight 0 in proportion to their shares, which keeps to the caps because none is below its client's share.
    """
    if guard is None:
        return weights
    caps = guard * shares
    free, capped = weights > 0, torch.zeros_like(weights, dtype=torch.bool)
    while bool(free.any()):
        left = (1 - caps[capped].sum()).clamp_min(0)
        raised = weights * (left / weights[free].sum())
        over = free & (raised > caps)
        if not bool(over.any()):
            return torch.where(capped, caps, torch.where(free, raised, 0.0))
        free, capped = free & ~over, capped | over
    rest = torch.where(capped, 0.0, shares)
    left = (1 - caps[capped].sum()).clamp_min(0)
    return torch.where(capped, caps, rest * left / rest.sum().clamp_min(torch.finfo(rest.dtype).tiny))


def _by_length(guard: float | None, norms: Tensor) -> Tensor | None:
    """A guard for each of (K,) updates, from 1 for those near zero to `guard` for those as long as the median."""
    if guard is None:
        return None
    return (guard * norms / norms.median().clamp_min(torch.finfo(norms.dtype).tiny)).clamp(1, guard)


def _extrapolation(products: Tensor, weights: Tensor) -> float:
    """FedExP's factor on the step Σ_k weights_kΔ_k: more than 1 where the updates disagree."""
    squared = float(weights @ products @ weights)
    mean_square = float(weights @ products.diagonal())
    return min(max(1.0, mean_square / (2 * squared)), _EXTRAPOLATION) if squared > 0 else 1.0


def _norm(products: Tensor, weights: Tensor) -> float:
    """‖Σ_k weights_kΔ_k‖, or 0 where the updates cancel up to rounding."""
    squared = float(weights @ products @ weights)
    uncancelled = float(weights @ products.diagonal().sqrt()) ** 2
    return squared**0.5 if squared > _CANCELLED * uncancelled else 0.0
