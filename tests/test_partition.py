from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedu2.data import Dataset, ImageSet, load_partition, make_partition, partition, save_partition
from fedu2.data.partition import strategies
from fedu2.errors import DataError, UsageError
from fedu2.experiment import Experiment
from fedu2.options import PartitionOptions

LABELS = torch.arange(1000) % 10


def dataset(n: int = 1000, labels: torch.Tensor | None = LABELS, **kwargs) -> Dataset:
    images = torch.zeros(n, 3, 8, 8, dtype=torch.uint8)
    return Dataset("test", ImageSet(images, labels), ImageSet(images[:0], None), **kwargs)


def assert_dealt_once(shares: list[torch.Tensor], n: int) -> None:
    assert all(share.dtype == torch.int64 for share in shares)
    assert all(share.equal(share.sort().values) for share in shares)
    assert torch.cat(shares).sort().values.tolist() == list(range(n))


@st.composite
def deals(draw):
    clients = draw(st.integers(1, 12))
    min_size = draw(st.integers(1, 9))
    n = clients * min_size + draw(st.integers(0, 150))
    labels = draw(st.lists(st.integers(0, 6), min_size=n, max_size=n))
    alpha = draw(st.sampled_from([1e-300, 1e-8, 1e-3, 0.1, 1.0, 100.0, 1e12, 1e308]))
    return torch.tensor(labels), n, {"clients": clients, "min_size": min_size, "alpha": alpha}


@settings(max_examples=120)
@given(deal=deals(), strategy=st.sampled_from(["dirichlet", "quantity", "iid"]), seed=st.integers(0, 2**32))
def test_every_image_is_dealt_once_and_no_client_is_too_small(deal, strategy, seed):
    labels, n, options = deal
    shares = partition(labels, n, strategy=strategy, seed=seed, **options)
    assert len(shares) == options["clients"]
    assert_dealt_once(shares, n)
    assert min(map(len, shares)) >= options["min_size"]
    again = partition(labels, n, strategy=strategy, seed=seed, **options)
    assert all(a.equal(b) for a, b in zip(shares, again, strict=True))


@settings(max_examples=80)
@given(clients=st.integers(1, 20), each=st.integers(1, 10), classes=st.integers(1, 10), seed=st.integers(0, 99))
def test_classes_gives_every_client_its_number_of_classes(clients, each, classes, seed):
    n = 40 * classes
    labels = torch.arange(n) % classes
    options = {"strategy": "classes", "clients": clients, "classes_per_client": each, "seed": seed}
    if each > classes or clients * each < classes:
        with pytest.raises(UsageError, match="classes"):
            partition(labels, n, **options)
        return
    shares = partition(labels, n, **options)
    assert_dealt_once(shares, n)
    held = [set(labels[share].tolist()) for share in shares]
    assert {len(classes_of) for classes_of in held} == {each}
    holders = [sum(label in classes_of for classes_of in held) for label in range(classes)]
    assert max(holders) - min(holders) <= 1


def test_seeds_and_strategies_differ():
    drawn = [
        partition(LABELS, 1000, clients=5, strategy=strategy, seed=seed)[0].tolist()
        for strategy in strategies
        for seed in range(3)
    ]
    assert len({tuple(indices) for indices in drawn}) == len(drawn)


def class_skew(shares: list[torch.Tensor]) -> float:
    """Mean share of a client's most frequent class: 0.1 for ten balanced classes, 1 for a single one."""
    return float(np.mean([LABELS[share].bincount().max() / len(share) for share in shares]))


def test_alpha_sets_the_skew():
    skews = [
        np.mean([class_skew(partition(LABELS, 1000, clients=5, alpha=alpha, seed=seed)) for seed in range(10)])
        for alpha in (0.01, 0.3, 1000.0)
    ]
    assert skews[0] > skews[1] + 0.1 > skews[2] + 0.2
    assert skews[2] < 0.13
    sizes = [
        np.std([len(share) for share in partition(LABELS, 1000, clients=5, strategy="quantity", alpha=alpha)])
        for alpha in (0.1, 1000.0)
    ]
    assert sizes[0] > 100 > 20 > sizes[1]
    assert class_skew(partition(LABELS, 1000, clients=5, strategy="iid")) < 0.16
    assert [len(share) for share in partition(LABELS, 1000, clients=3, strategy="iid")] == [334, 333, 333]


def test_dirichlet_proportions_have_the_right_moments():
    """A client's part of a class has mean 1/K and variance (K − 1) / (K² (Kα + 1)) under Dirichlet(α)."""
    K, alpha = 4, 0.5
    labels = torch.arange(40_000) % 2000  # 2,000 classes: as many draws
    shares = partition(labels, len(labels), clients=K, alpha=alpha, min_size=1)
    parts = torch.stack([labels[share].bincount(minlength=2000) for share in shares]) / 20
    assert parts.mean(1).numpy() == pytest.approx([1 / K] * K, abs=0.03)
    expected = (K - 1) / (K**2 * (K * alpha + 1))
    assert parts.var(1).mean().item() == pytest.approx(expected, rel=0.06)


def test_alpha_beyond_floating_point_means_its_limits():
    """α → ∞: equal parts of each class; α → 0: one owner for each class, and any client may be that one."""
    equal = partition(LABELS, 1000, clients=5, alpha=1e308)
    assert all(LABELS[share].bincount().tolist() == [20] * 10 for share in equal)
    single = partition(LABELS, 1000, clients=2, alpha=1e-300, min_size=1)
    assert {count for share in single for count in LABELS[share].bincount(minlength=10).tolist()} == {0, 100}


def test_filling_up_takes_from_the_largest():
    """One owner per class: with two classes and five clients, resampling alone can never succeed."""
    labels = torch.arange(100) % 2
    shares = partition(labels, 100, clients=5, alpha=1e-9, min_size=10)
    assert_dealt_once(shares, 100)
    assert sorted(map(len, shares))[:3] == [10, 10, 10]
    assert [len(share) for share in partition(labels, 100, clients=10, alpha=0.01, min_size=10)] == [10] * 10


def test_impossible_requests_are_explained():
    def deal(**options):
        return partition(LABELS, 1000, **{"clients": 5, **options})

    with pytest.raises(DataError, match="1000 images cannot give 5 clients at least 201"):
        deal(min_size=201)
    with pytest.raises(DataError, match="cannot be dealt to 1001 clients"):
        deal(clients=1001, strategy="iid")
    with pytest.raises(UsageError, match="alpha=0"):
        deal(alpha=0)
    with pytest.raises(UsageError, match="alpha=nan"):
        deal(alpha=float("nan"))
    with pytest.raises(UsageError, match="clients=0"):
        deal(clients=0)
    with pytest.raises(UsageError, match="did you mean 'dirichlet'"):
        deal(strategy="dirichle")
    for strategy in ("dirichlet", "classes"):
        with pytest.raises(DataError, match=f"{strategy} needs labels"):
            partition(None, 1000, clients=5, strategy=strategy)
    with pytest.raises(DataError, match=r"client \d without images"):
        partition(torch.tensor([0, 0, 0, 0, 1]), 5, clients=4, strategy="classes", classes_per_client=1)
    with pytest.raises(DataError, match="999 labels"):
        partition(LABELS[:-1], 1000, clients=5)


def test_unlabelled_images_can_be_dealt():
    for strategy in ("iid", "quantity"):
        assert_dealt_once(partition(None, 300, clients=4, strategy=strategy), 300)


def test_make_partition_follows_the_experiment():
    experiment = Experiment(clients=7, partition="quantity", alpha=0.2, seed=3, split=PartitionOptions(min_size=20))
    made = make_partition(dataset(), experiment)
    expected = partition(LABELS, 1000, clients=7, strategy="quantity", alpha=0.2, seed=3, min_size=20)
    assert all(a.equal(b) for a, b in zip(made, expected, strict=True))


def test_owners_come_first():
    owners = torch.tensor([1, 0, 1, 2])
    own = dataset(4, None, owners=owners, client_names=("a", "b", "c"))
    for strategy in ("dirichlet", "iid", "folders"):
        shares = make_partition(own, Experiment(clients=9, partition=strategy))
        assert [share.tolist() for share in shares] == [[1], [0, 2], [3]]
    with pytest.raises(UsageError, match=r"data\.layout=clients"):
        make_partition(dataset(), Experiment(partition="folders"))
    with pytest.raises(DataError, match="no training images: d"):
        make_partition(dataset(4, None, owners=owners, client_names=tuple("abcd")), Experiment())


def test_files_round_trip(tmp_path):
    shares = partition(LABELS, 1000, clients=6)
    path = tmp_path / "shares.json"
    save_partition(path, shares)
    assert all(a.equal(b) for a, b in zip(load_partition(path, 1000), shares, strict=True))
    for owners in (None, torch.zeros(1000, dtype=torch.int64)):
        experiment = Experiment(partition="file", split=PartitionOptions(file=str(path)))
        made = make_partition(dataset(owners=owners, client_names=("a",)), experiment)
        assert all(a.equal(b) for a, b in zip(made, shares, strict=True))
    assert list(tmp_path.iterdir()) == [path]
    with pytest.raises(UsageError, match=r"split\.file"):
        make_partition(dataset(), Experiment(partition="file"))


def test_a_plain_list_may_leave_images_out(tmp_path):
    path = tmp_path / "shares.json"
    path.write_text(json.dumps([[5, 1], [3]]))
    assert [share.tolist() for share in load_partition(path, 6)] == [[1, 5], [3]]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[[0, 1], [1]]", "client 1 .* index 1, which client 0 has already"),
        ("[[2, 2]]", "index 2, which client 0 has already"),
        ("[[0], [6]]", "index 6, which is not a whole number from 0 to 5"),
        ("[[-1]]", "index -1"),
        ("[[1.0]]", r"index 1\.0"),
        ("[[true]]", "index True"),
        ('[["1"]]', "index '1'"),
        ("[[0], []]", "client 1 .* at least one index"),
        ("[0, 1]", "client 0 .* must be a list"),
        ("[]", "must hold a list"),
        ('{"client": [[0]]}', "must hold a list"),
        ("3", "must hold a list"),
        ("[[0]", "cannot be read"),
        ("[" * 100_000, "cannot be read"),
        ("\udcff", "cannot be read"),
    ],
)
def test_bad_files_are_explained(text, message, tmp_path):
    path = tmp_path / "shares.json"
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(DataError, match=message):
        load_partition(path, 6)


def test_a_missing_file_is_explained(tmp_path):
    with pytest.raises(DataError, match="cannot be read"):
        load_partition(tmp_path / "missing.json", 6)
