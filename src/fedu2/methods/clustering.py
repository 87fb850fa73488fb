"""Orchestra's clustering on the unit sphere, at a client and at the server: pure functions of tensors.

Sinkhorn and Knopp, Concerning Nonnegative Matrices and Doubly Stochastic Matrices, Pacific J. Math. 1967; the use for
clusters of equal size: Asano et al., Self-Labelling via Simultaneous Clustering, ICLR 2020; Lubana et al., ICML 2022.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fedu2.federation.optimizers import PlainSGD

__all__ = ["clustering_loss", "equal_clusters", "global_clusters", "initial_clusters", "local_clusters"]

SHARPNESS = 25.0  # λ
TOLERANCE = 1e-2
CHECKED_EVERY = 10  # iterations; a check makes the host wait for the device


def equal_clusters(similarity: Tensor, *, iterations: int = 100) -> Tensor:
    """Soft assignment Q of N points to G clusters of equal size, from their similarities S, both (N, G).

    Q = diag(u) softmax(λS) diag(v), the softmax over clusters, with u and v scaled in turn so that each point has mass
    1 and each cluster N/G. Ends when an iteration, every tenth is looked at, changes u by Σ|u_old/u_new − 1| < 0.01,
    or after `iterations`; points have their mass exactly, clusters up to what is left to converge.
    """
    return _equalised(similarity, similarity.new_ones(len(similarity)), iterations)[0]


@torch.no_grad()
def _equalised(similarity: Tensor, u: Tensor, iterations: int = 100) -> tuple[Tensor, Tensor]:
    """Q (N, G) and its u (N,), from the u of a similar problem on, or from ones."""
    by_point = F.softmax(SHARPNESS * similarity, dim=1)  # (N, G)
    points, clusters = by_point.shape
    by_cluster = (by_point.T * (clusters / points)).contiguous()  # (G, N); contiguous, because it is read so often
    for done in range(1, iterations + 1):
        v = (by_cluster @ u).reciprocal()
        before, u = u, (by_point @ v).reciprocal()
        if done % CHECKED_EVERY == 0 and done < iterations and (before / u - 1).abs().sum() < TOLERANCE:
            break
    return u[:, None] * by_point * v, u


def local_clusters(points: Tensor, count: int, generator: torch.Generator, *, iterations: int = 5) -> Tensor:
    """L = `count` centroids (L, d) of a client's points (n, d), all of unit length; `generator` is the CPU's.

    From L random points on: assign each point to the cluster where `equal_clusters` puts most of it, move centroids to
    the normalised means; one without points jumps to a random point. Where there are no more than L points they are
    their own centroids, repeated in turn up to L.
    """
    n = len(points)
    if n <= count:
        return points[torch.arange(count, device=points.device) % n]
    centroids = points[torch.randperm(n, generator=generator)[:count].to(points.device)]
    for _ in range(iterations):
        chosen = equal_clusters(points @ centroids.T, iterations=10).argmax(1)  # (n,)
        members = F.one_hot(chosen, count).to(points)  # (n, L)
        spare = points[torch.randint(n, (count,), generator=generator).to(points.device)]
        means = F.normalize(members.T @ points, dim=1)
        centroids = torch.where(members.any(0)[:, None], means, spare)
    return centroids


def initial_clusters(points: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """G = `count` unit vectors (G, d) to start from: random points of (n, d), each a little beside itself.

    The points come in a random order, over and over if there are fewer than G; without the displacement, of length
    0.3 in a random direction, centroids that start at one point would stay together for ever.
    """
    drawn = torch.randperm(len(points), generator=generator)[torch.arange(count) % len(points)]
    beside = F.normalize(torch.randn(count, points.shape[1], generator=generator), dim=1)
    return F.normalize(points[drawn.to(points.device)] + 0.3 * beside.to(points), dim=1)


def clustering_loss(centroids: Tensor, points: Tensor, temperature: float) -> Tensor:
    """−mean_i cos(Q_i, softmax(Z Cᵀ/τ)_i): how far centroids C (G, d) are from splitting points Z (n, d) equally.

    −1 at best. The equal assignment Q counts as given: no gradient goes through it.
    """
    similarity = points @ centroids.T  # (n, G)
    return _apart(equal_clusters(similarity), similarity, temperature)


def _apart(assigned: Tensor, similarity: Tensor, temperature: float) -> Tensor:
    return -F.cosine_similarity(assigned, F.softmax(similarity / temperature, dim=1), dim=1).mean()


@torch.enable_grad()
def global_clusters(centroids: Tensor, points: Tensor, *, steps: int, temperature: float) -> Tensor:
    """C (G, d) of unit rows after `steps` of SGD on `clustering_loss` of points Z (n, d), starting at `centroids`.

    Learning rate 0.01, momentum 0.9, weight decay 1e-4; rows are brought back to unit length after each step. The
    assignment of a step begins with the u of the step before, which differs little: it takes a few iterations where it
    would take up to a hundred from ones on, and clusters come nearer to equal masses.
    """
    moving = F.normalize(centroids, dim=1).requires_grad_()
    optimizer = PlainSGD(moving, lr=0.01, momentum=0.9, weight_decay=1e-4)
    u = points.new_ones(len(points))
    for _ in range(steps):
        moving.grad = None
        similarity = points @ moving.T
        assigned, u = _equalised(similarity, u)
        _apart(assigned, similarity, temperature).backward()
        optimizer.step()
        with torch.no_grad():
            moving.copy_(F.normalize(moving, dim=1))
    return moving.detach()
