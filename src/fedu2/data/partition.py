"""Who holds what: training images dealt out to clients, disjoint and reproducible from the experiment's seed.

| partition | a client's share |
| --- | --- |
| dirichlet | of every class c a part p_c ~ Dirichlet(α), so that small α gives few classes and unequal sizes |
| iid | equal sizes, classes as in the whole |
| classes | images of `split.classes_per_client` classes; each class is divided evenly among its holders |
| quantity | sizes ~ Dirichlet(α), classes as in the whole |
| file | the lists of indices in the JSON file `split.file`, which may leave images out |
| folders | the client's own folder |

With dirichlet and quantity every client gets at least `split.min_size` images. Data that come already split
(dataset=folder in layout clients) keep their owners whatever `partition` says, except file. For file and folders the
number of clients is that of the lists or folders, not `clients`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedu2.data.base import Dataset
from fedu2.errors import DataError, UsageError
from fedu2.experiment import Experiment
from fedu2.files import atomic_file, digest_of, read_json, user_path
from fedu2.registry import Registry
from fedu2.seeds import derive

__all__ = [
    "Deal",
    "digest_of_partition",
    "load_partition",
    "make_partition",
    "partition",
    "save_partition",
    "strategies",
]

Indices = NDArray[np.int64]
Counts = NDArray[np.int64]

ATTEMPTS = 100  # draws before too small clients are filled up by hand


@dataclass(frozen=True, eq=False)
class Deal:
    """What a strategy knows: n images, their labels if any, and the options that concern it."""

    n: int
    clients: int
    labels: Indices | None
    alpha: float
    min_size: int
    classes_per_client: int
    rng: np.random.Generator


strategies: Registry[Callable[[Deal], list[Indices]]] = Registry("partition")


def make_partition(dataset: Dataset, experiment: Experiment) -> list[Tensor]:
    """The training images of each client: sorted int64 indices into `dataset.train`."""
    n = len(dataset.train)
    if experiment.partition == "file":
        if experiment.split.file is None:
            raise UsageError("partition=file needs the file: split.file=PATH")
        return load_partition(experiment.split.file, n)
    if dataset.owners is not None:
        return _by_owner(dataset.owners, dataset.client_names)
    if experiment.partition == "folders":
        raise UsageError("partition=folders needs one folder per client: dataset=folder data.layout=clients")
    return partition(
        dataset.train.labels,
        n,
        strategy=experiment.partition,
        clients=experiment.clients,
        seed=experiment.seed,
        alpha=experiment.alpha,
        min_size=experiment.split.min_size,
        classes_per_client=experiment.split.classes_per_client,
    )


def partition(
    labels: Tensor | None,
    n: int,
    *,
    clients: int,
    strategy: str = "dirichlet",
    seed: int = 0,
    alpha: float = 0.1,
    min_size: int = 8,
    classes_per_client: int = 2,
) -> list[Tensor]:
    """Deal n images out to `clients`: one sorted int64 index tensor each; every image is dealt exactly once."""
    if clients < 1:
        raise UsageError(f"clients={clients} must be at least 1")
    if not 0 < alpha < float("inf"):
        raise UsageError(f"alpha={alpha} must be positive")
    if labels is not None and len(labels) != n:
        raise DataError(f"{len(labels)} labels were given for {n} images")
    if n < clients:
        raise DataError(f"{n} images cannot be dealt to {clients} clients: lower clients")
    known = None if labels is None else labels.cpu().numpy().astype(np.int64)
    rng = np.random.default_rng(derive(seed, "partition"))
    deal = Deal(n, clients, known, alpha, min_size, classes_per_client, rng)
    return _as_tensors(strategies[strategy](deal))


@strategies.register("iid")
def _iid(deal: Deal) -> list[Indices]:
    return np.array_split(deal.rng.permutation(deal.n), deal.clients)


@strategies.register("quantity")
def _quantity(deal: Deal) -> list[Indices]:
    return _skewed(deal, [np.arange(deal.n)])


@strategies.register("dirichlet")
def _dirichlet(deal: Deal) -> list[Indices]:
    return _skewed(deal, _by_class(deal, "dirichlet"))


@strategies.register("classes")
def _classes(deal: Deal) -> list[Indices]:
    groups = _by_class(deal, "classes")
    shares: list[list[Indices]] = [[] for _ in range(deal.clients)]
    for images, holders in zip(groups, _holders(deal, len(groups)), strict=True):
        for client, part in zip(holders, np.array_split(deal.rng.permutation(images), len(holders)), strict=True):
            shares[client].append(part)
    dealt = [np.concatenate(parts) for parts in shares]
    if empty := [client for client, share in enumerate(dealt) if not len(share)]:
        raise DataError(
            f"partition=classes leaves client {empty[0]} without images, for its classes have fewer images than "
            "holders: lower clients or split.classes_per_client"
        )
    return dealt


def _holders(deal: Deal, classes: int) -> list[list[int]]:
    """The clients that hold each class. Clients choose in turn among the classes with the fewest holders."""
    each = deal.classes_per_client
    if each > classes:
        raise UsageError(f"split.classes_per_client={each} is more than the {classes} classes there are")
    if deal.clients * each < classes:
        raise UsageError(
            f"{deal.clients} clients with {each} classes each cannot hold all {classes} classes: "
            "raise clients or split.classes_per_client"
        )
    holders: list[list[int]] = [[] for _ in range(classes)]
    for client in range(deal.clients):
        shuffled = deal.rng.permutation(classes).tolist()
        for label in sorted(shuffled, key=lambda label: len(holders[label]))[:each]:
            holders[label].append(client)
    return holders


def _by_class(deal: Deal, strategy: str) -> list[Indices]:
    """The images of each class that occurs."""
    if deal.labels is None:
        raise DataError(f"partition={strategy} needs labels, and these images have none: use iid or quantity")
    return [np.flatnonzero(deal.labels == label) for label in np.unique(deal.labels)]


def _skewed(deal: Deal, groups: Sequence[Indices]) -> list[Indices]:
    """Every group divided by its own Dirichlet(α) proportions, drawn again while a client stays too small."""
    if deal.n < deal.clients * deal.min_size:
        raise DataError(
            f"{deal.n} images cannot give {deal.clients} clients at least {deal.min_size} each: "
            "lower clients or split.min_size"
        )
    for _ in range(ATTEMPTS):
        cuts = [_cuts(deal, len(images)) for images in groups]
        sizes = np.sum([np.diff(cut) for cut in cuts], axis=0)
        if sizes.min() >= deal.min_size:
            break
    parts = [np.split(deal.rng.permutation(images), cut[1:-1]) for images, cut in zip(groups, cuts, strict=True)]
    shares = [np.concatenate(of_client) for of_client in zip(*parts, strict=True)]
    return _filled_up(shares, deal.min_size)


def _cuts(deal: Deal, size: int) -> Counts:
    """Borders 0 = b_0 ≤ … ≤ b_K = size that divide `size` images in Dirichlet(α) proportions."""
    alpha = min(deal.alpha, 1e12)  # parts are equal from here on, and sums of larger numbers overflow in the end
    proportions = deal.rng.dirichlet(np.full(deal.clients, alpha))
    inner = np.rint(np.cumsum(proportions)[:-1] * size).astype(np.int64)
    return np.concatenate([[0], np.clip(inner, 0, size), [size]])


def _filled_up(shares: list[Indices], min_size: int) -> list[Indices]:
    """Clients below `min_size` get what they lack from whoever is largest at the time."""
    for client in range(len(shares)):
        while (lack := min_size - len(shares[client])) > 0:
            donor = int(np.argmax([len(share) for share in shares]))
            keep = len(shares[donor]) - min(lack, len(shares[donor]) - min_size)
            shares[client] = np.concatenate([shares[client], shares[donor][keep:]])
            shares[donor] = shares[donor][:keep]
    return shares


def _by_owner(owners: Tensor, names: tuple[str, ...]) -> list[Tensor]:
    shares = [(owners == client).nonzero().flatten().cpu() for client in range(len(names))]
    if empty := [name for name, share in zip(names, shares, strict=True) if not len(share)]:
        raise DataError(f"these clients have no training images: {', '.join(empty)}")
    return shares


def _as_tensors(shares: Sequence[Indices]) -> list[Tensor]:
    return [torch.from_numpy(np.sort(share).astype(np.int64)) for share in shares]


def save_partition(path: Path | str, shares: Sequence[Tensor]) -> None:
    """Write `shares` as JSON, `{"clients": [[0, 4, …], …]}`, for `partition=file`, with their digest."""
    text = json.dumps({"digest": digest_of_partition(shares), **_content(shares)})
    with atomic_file(Path(path)) as temporary:
        temporary.write_text(text + "\n", encoding="utf-8")


def digest_of_partition(shares: Sequence[Tensor]) -> str:
    """What a partition is known by, in its file and in checkpoints."""
    return digest_of(_content(shares))


def _content(shares: Sequence[Tensor]) -> dict[str, Any]:
    return {"clients": [share.tolist() for share in shares]}


def load_partition(path: Path | str, n: int, *, untouched: bool = False) -> list[Tensor]:
    """The shares in a JSON file, a list of lists of indices or that under "clients", checked against n images.

    untouched: the file must be as `save_partition` wrote it, by its digest.
    """
    try:
        content = read_json(user_path(path))
    except (OSError, ValueError) as error:
        raise DataError(f"the partition file {path} cannot be read ({error})") from error
    if untouched and isinstance(content, dict) and "digest" in content:
        digest = content.pop("digest")
        if digest != digest_of(content):
            raise DataError(f"the partition file {path} is damaged: its digest does not match")
    lists = content.get("clients") if isinstance(content, dict) else content
    if not isinstance(lists, list) or not lists:
        raise DataError(f'{path} must hold a list of index lists, one per client, or {{"clients": [[…], …]}}')
    owner: dict[int, int] = {}
    for client, indices in enumerate(lists):
        _claim(owner, client, indices, n, f"client {client} in {path}")
    return _as_tensors([np.array(indices, np.int64) for indices in lists])


def _claim(owner: dict[int, int], client: int, indices: Any, n: int, origin: str) -> None:
    """Note that `client` holds `indices`, unless they are no indices or already taken."""
    if not isinstance(indices, list) or not indices:
        raise DataError(f"{origin} must be a list with at least one index")
    for index in indices:
        if type(index) is not int or not 0 <= index < n:
            raise DataError(f"{origin} has the index {index!r}, which is not a whole number from 0 to {n - 1}")
        if index in owner:
            raise DataError(f"{origin} has the index {index}, which client {owner[index]} has already")
        owner[index] = client
