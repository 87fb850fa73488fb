from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fedu2.methods.clustering import (
    _equalised,
    clustering_loss,
    equal_clusters,
    global_clusters,
    initial_clusters,
    local_clusters,
)

SIZES = [(5, 3), (3, 7), (12, 4), (40, 16)]


def _random(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _unit(rows: int, size: int, seed: int = 0) -> Tensor:
    return F.normalize(torch.randn(rows, size, generator=_random(seed), dtype=torch.float64), dim=1)


def _groups(sizes: list[int], d: int, seed: int = 0, spread: float = 0.1) -> tuple[Tensor, Tensor]:
    """Orthogonal directions (len(sizes), d), and sizes[g] points around the g-th."""
    directions = torch.linalg.qr(torch.randn(d, len(sizes), generator=_random(seed))).Q.T
    around = directions.repeat_interleave(torch.tensor(sizes), dim=0)
    points = around + spread * d**-0.5 * torch.randn(around.shape, generator=_random(seed + 1))
    return directions, F.normalize(points, dim=1)


def _sinkhorn_by_loops(
    similarity: Tensor, iterations: int, tolerance: float = 0.0, columns: list[float] | None = None
) -> tuple[Tensor, int]:
    """As published: scale a G×N matrix to row sums 1/G and column sums 1/N in turn; the plan times N, and the count.

    columns: the scaling to begin with, all alike by default; what it ends with is put there.
    """
    n, g = similarity.shape
    plan = [[float(p) for p in row] for row in F.softmax(25 * similarity, dim=1)]
    rows, columns = [0.0] * g, [1 / n] * n if columns is None else columns
    for count in range(1, iterations + 1):
        rows = [1 / g / sum(plan[i][k] * columns[i] for i in range(n)) for k in range(g)]
        new = [1 / n / sum(plan[i][k] * rows[k] for k in range(g)) for i in range(n)]
        change = sum(abs(old / fresh - 1) for old, fresh in zip(columns, new, strict=True))
        columns[:] = new
        if count % 10 == 0 and change < tolerance:
            break
    scaled = [[n * columns[i] * plan[i][k] * rows[k] for k in range(g)] for i in range(n)]
    return torch.tensor(scaled, dtype=torch.float64), count


@pytest.mark.parametrize(("n", "g"), SIZES)
@pytest.mark.parametrize("iterations", [1, 2, 9])
def test_sinkhorn_against_a_loop(n: int, g: int, iterations: int) -> None:
    similarity = _unit(n, 6) @ _unit(g, 6, 1).T
    expected, _ = _sinkhorn_by_loops(similarity, iterations)
    assert torch.allclose(equal_clusters(similarity, iterations=iterations), expected, rtol=1e-10)


@pytest.mark.parametrize(("scale", "count"), [(0.2, 10), (0.4, 20), (1.0, 60)])
def test_sinkhorn_stops_when_it_stands_still(scale: float, count: int) -> None:
    similarity = scale * _unit(40, 6) @ _unit(16, 6, 1).T
    expected, needed = _sinkhorn_by_loops(similarity, 100, tolerance=1e-2)
    assert needed == count
    assert torch.allclose(equal_clusters(similarity), expected, rtol=1e-10)
    further, _ = _sinkhorn_by_loops(similarity, count + 10)
    assert not torch.allclose(equal_clusters(similarity), further, rtol=1e-7)


@pytest.mark.parametrize(("n", "g"), [*SIZES, (160, 128)])
@pytest.mark.parametrize("d", [16, 64])
def test_points_have_mass_one_and_clusters_are_equal(n: int, g: int, d: int) -> None:
    assigned = equal_clusters((_unit(n, d) @ _unit(g, d, 1).T).float())
    assert (assigned >= 0).all()
    assert torch.allclose(assigned.sum(1), torch.ones(n), atol=1e-5)
    # The last iteration changed every u by less than 0.01, and the clusters were equal before it.
    assert torch.allclose(assigned.sum(0), torch.full((g,), n / g), rtol=0.0101)


def test_clusters_are_equal_however_uneven_the_similarities() -> None:
    similarity = -0.6 + 0.05 * torch.randn(60, 6, generator=_random())
    similarity[:, 2] += 1.4  # the cluster that everybody likes
    similarity[:, 4] -= 0.3  # and one that nobody does
    crowd = F.softmax(25 * similarity, dim=1).sum(0)
    assert crowd[2] > 59.9
    assert crowd[4] < 1e-12
    assigned = equal_clusters(similarity)
    assert torch.allclose(assigned.sum(1), torch.ones(60), atol=1e-5)
    assert torch.allclose(assigned.sum(0), torch.full((6,), 10.0), rtol=0.0101)


def test_points_that_are_all_alike_are_spread_evenly() -> None:
    similarity = torch.tensor([[0.9, -0.2, 0.1]]).expand(6, 3)
    assert torch.allclose(equal_clusters(similarity), torch.full((6, 3), 1 / 3), atol=1e-6)


def _local_by_loops(points: Tensor, count: int, generator: torch.Generator) -> tuple[Tensor, int]:
    """The centroids, and how often one was found without points."""
    n, empty = len(points), 0
    centroids = [points[i] for i in torch.randperm(n, generator=generator)[:count]]
    for _ in range(5):
        assigned, _ = _sinkhorn_by_loops(points @ torch.stack(centroids).T, 10)
        spare = torch.randint(n, (count,), generator=generator)
        groups = [[p for p, row in zip(points, assigned, strict=True) if int(row.argmax()) == k] for k in range(count)]
        empty += sum(not group for group in groups)
        means = [torch.stack(group).mean(0) if group else points[s] for group, s in zip(groups, spare, strict=True)]
        centroids = [mean / mean.norm() for mean in means]
    return torch.stack(centroids), empty


@pytest.mark.parametrize(("n", "count", "d"), [(20, 3, 4), (90, 8, 6), (20, 12, 2)])
def test_local_clusters_against_a_loop(n: int, count: int, d: int) -> None:
    points = _unit(n, d)
    expected, empty = _local_by_loops(points, count, _random(3))
    assert torch.allclose(local_clusters(points, count, _random(3)), expected, atol=1e-9)
    assert (empty > 0) == (d == 2)  # clusters without points do occur


def test_local_clusters_find_groups_and_repeat() -> None:
    directions, points = _groups([10, 10, 10, 10], 16)
    centroids = local_clusters(points, 8, _random())
    assert torch.allclose(centroids.norm(dim=1), torch.ones(8), atol=1e-6)
    assert (centroids @ directions.T).amax(0).min() > 0.95  # every direction has a centroid
    assert torch.equal(centroids, local_clusters(points, 8, _random()))
    assert not torch.equal(centroids, local_clusters(points, 8, _random(1)))


@pytest.mark.parametrize("n", [1, 2, 5])
def test_a_client_with_few_points_sends_them_in_turn(n: int) -> None:
    points = _unit(n, 4)
    centroids = local_clusters(points, 5, _random())
    assert torch.equal(centroids, torch.stack([points[i % n] for i in range(5)]))
    assert centroids.data_ptr() != points.data_ptr()


def test_local_clusters_of_points_that_are_all_alike() -> None:
    point = F.normalize(torch.ones(1, 3), dim=1)
    assert torch.allclose(local_clusters(point.expand(12, 3), 4, _random()), point.expand(4, 3))


@pytest.mark.parametrize(("n", "g"), [(12, 5), (5, 5), (5, 13)])
def test_global_clusters_start_beside_the_points_each_as_often_as_any_other(n: int, g: int) -> None:
    points = torch.eye(n, 16)
    start = initial_clusters(points, g, _random())
    assert torch.allclose(start.norm(dim=1), torch.ones(g), atol=1e-6)
    used = (start @ points.T).argmax(1).bincount(minlength=n)
    assert used.max() - used.min() <= 1
    assert (start @ points.T).amax(1).min() > 0.9
    assert torch.pdist(start).min() > 0.1  # none on top of another
    assert torch.equal(start, initial_clusters(points, g, _random()))
    assert not torch.equal(start, initial_clusters(points, g, _random(1)))


@pytest.mark.parametrize(("n", "g"), SIZES)
def test_clustering_loss_against_a_loop(n: int, g: int) -> None:
    points, centroids = _unit(n, 6), _unit(g, 6, 1)
    equal, _ = _sinkhorn_by_loops(points @ centroids.T, 100, tolerance=1e-2)
    cosines = []
    for i in range(n):
        weights = [torch.exp(points[i] @ c / 0.1) for c in centroids]
        soft = torch.stack(weights) / sum(weights)
        cosines.append(equal[i] @ soft / (equal[i].norm() * soft.norm()))
    assert clustering_loss(centroids, points, 0.1).item() == pytest.approx(-float(sum(cosines)) / n, rel=1e-9)


def test_global_clustering_is_sgd_with_momentum_on_the_sphere() -> None:
    """Five steps by hand; the equal assignment stands still while the gradient is taken, and begins with the last."""
    points, centroids = _unit(7, 3), _unit(4, 3, 1)
    current, velocity = centroids.clone(), torch.zeros_like(centroids)
    columns = [1 / 7] * 7
    for step in range(5):
        equal, _ = _sinkhorn_by_loops(points @ current.T, 100, tolerance=1e-2, columns=columns)
        variable = current.clone().requires_grad_()
        soft = F.softmax(points @ variable.T / 0.2, dim=1)
        loss = -((equal * soft).sum(1) / equal.norm(dim=1) / soft.norm(dim=1)).mean()
        (gradient,) = torch.autograd.grad(loss, variable)
        velocity = 0.9 * velocity + gradient + 1e-4 * current
        current = F.normalize(current - 0.01 * velocity, dim=1)
        moved = global_clusters(centroids, points, steps=step + 1, temperature=0.2)
        assert torch.allclose(moved, current, rtol=0, atol=1e-12)
    assert (current - centroids).abs().max() > 1e-3


def test_an_assignment_that_begins_with_a_similar_one_is_nearer_to_equal_masses() -> None:
    _, points = _groups([8] * 20, 32, spread=0.5)
    before = initial_clusters(points, 128, _random())
    after = F.normalize(before + 0.01 * _unit(128, 32).float(), dim=1)
    u = _equalised(points @ before.T, torch.ones(160))[1]

    def error(assigned: Tensor) -> float:
        return float((assigned.sum(0) / (160 / 128) - 1).abs().max())

    anew, on = equal_clusters(points @ after.T), _equalised(points @ after.T, u)[0]
    assert torch.allclose(on.sum(1), torch.ones(160), atol=1e-5)
    assert error(on) < error(anew) / 2


@pytest.mark.parametrize(
    ("sizes", "shares"), [([12, 12, 12, 12], [1, 1, 1, 1]), ([12, 12, 12, 12], [2, 2, 2, 2]), ([20, 10, 10], [6, 3, 3])]
)
@pytest.mark.parametrize("seed", [0, 1])
def test_each_direction_gets_its_share_of_global_clusters(sizes: list[int], shares: list[int], seed: int) -> None:
    directions, points = _groups(sizes, 16, seed)
    start = F.normalize(torch.randn(sum(shares), 16, generator=_random(seed + 100)), dim=1)
    kept = start.clone()
    with torch.no_grad():  # the server may well be called in here
        found = global_clusters(start, points, steps=500, temperature=0.1)
    assert torch.equal(start, kept)
    assert not found.requires_grad
    assert torch.allclose(found.norm(dim=1), torch.ones(sum(shares)), atol=1e-6)
    assert clustering_loss(found, points, 0.1) < clustering_loss(start, points, 0.1) - 0.05

    own = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))  # the direction of each point

    def shares_and_purity(centroids: Tensor) -> tuple[list[int], float]:
        """How many centroids each direction has, and how much of the points goes to those of their own direction."""
        nearest = (centroids @ directions.T).argmax(1)
        soft = F.softmax(points @ centroids.T / 0.1, dim=1)
        return nearest.bincount(minlength=len(sizes)).tolist(), float((soft * (nearest == own[:, None])).sum(1).mean())

    before, after = shares_and_purity(start), shares_and_purity(found)
    assert before[0] != shares == after[0]
    assert before[1] < 0.9 < after[1]
