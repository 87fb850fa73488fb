"""What the paper shows, as experiments: every cell of a table is a row (a method) in a setting (data and clients).

A cell is a complete configuration but for its seed. Tables and figures share cells: FedBYOL on CIFAR-10 with ten
clients and α = 0.1 is trained once and stands in Table 1 by its linear probe, in Table 2 by its nearest neighbours.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import Any

import yaml

from fedu2.experiment import Experiment
from fedu2.methods import resolve
from fedu2.paper.rows import BESIDE, HARDER, RECIPE, ROW_TRY_SETTINGS, ROWS, TRIES, TRY_SETTINGS
from fedu2.registry import Registry

__all__ = [
    "FIGURE_METHODS",
    "HOME",
    "OWN_TABLES",
    "PROTOCOLS",
    "TABLES",
    "Cell",
    "Exhibit",
    "Series",
    "exhibits",
    "home_cells",
    "published",
    "setting_title",
    "tries",
]

TABLES = ("table1", "table2")
OWN_TABLES = ("harder",)  # not in the paper
CROSS_DEVICE = 100  # clients from which on only a share of them takes part in a round
PARTICIPATION = 0.5  # that share, as in the authors' code

# The scores of a record, by the names that `fedu2 evaluate` gives them, and their titles in tables.
PROTOCOLS = {"knn": "kNN", "linear": "LP", "finetune 1 %": "FT 1 %", "finetune 10 %": "FT 10 %"}


@dataclass(frozen=True)
class Cell:
    """One configuration; with a seed it is a run."""

    setting: str  # such as cifar10-k10-a0.1
    row: str  # such as fedu2-byol
    title: str  # of the row
    values: Mapping[str, Any] = field(hash=False, compare=False)

    @property
    def name(self) -> str:
        return f"{self.setting}/{self.row}"

    def experiment(self, seed: int) -> Experiment:
        """Complete, every choice of the method filled in."""
        return resolve(Experiment.parse({**self.values, "seed": seed}))


def cell(setting: str, row: str, suffix: str = "", **settings: Any) -> Cell:
    """The cell of a known row in a setting; `settings` under a name of their own make a variant of it."""
    values = {**RECIPE, **_setting(setting), **ROWS[row].settings, **settings}
    return Cell(setting, row + suffix, ROWS[row].title, values)


def setting_title(name: str) -> str:
    """`cifar10-k10-a0.1` or `cifar10-k10-c2` in words; other names as they are."""
    parts = name.split("-")
    if len(parts) != 3:
        return name
    dataset, clients, deal = parts
    number = deal[1:]
    dealt = f"α = {number}" if deal[0] == "a" else f"{number} class{'' if number == '1' else 'es'} a client"
    return f"{dataset.upper().replace('CIFAR', 'CIFAR-')}, K = {clients[1:]}, {dealt}"


def _setting(name: str) -> dict[str, Any]:
    """DATASET-kCLIENTS-aALPHA, or DATASET-kCLIENTS-cCLASSES where every client has images of so many classes."""
    dataset, clients, deal = name.split("-")
    count = int(clients.removeprefix("k"))
    share = PARTICIPATION if count >= CROSS_DEVICE else 1.0
    return {
        "dataset": dataset,
        "clients": count,
        **(
            {"alpha": float(deal[1:])}
            if deal[0] == "a"
            else {"partition": "classes", "split.classes_per_client": int(deal[1:])}
        ),
        "participation": share,
        "rounds": round(RECIPE["rounds"] / share),  # each client makes as many steps
    }


@dataclass(frozen=True)
class Series:
    """A line of a figure: a cell for every x."""

    title: str
    cells: Mapping[float, Cell]


@dataclass(frozen=True)
class Exhibit:
    """A table or figure of the paper: its cells, and the protocols by which it shows them."""

    title: str
    protocols: Sequence[str]
    cells: Sequence[Cell] = ()
    series: Sequence[Series] = ()  # of a figure
    axis: str = ""  # what a figure's x is
    of_runs: bool = False  # drawn from runs; records do not have what it takes

    def all_cells(self) -> list[Cell]:
        """Each once, in order."""
        return list(dict.fromkeys([*self.cells, *(c for line in self.series for c in line.cells.values())]))


@cache
def published() -> Mapping[str, Mapping[str, Mapping[str, Sequence[float]]]]:
    """The paper's figures: exhibit → setting → row → one value for each of its protocols."""
    text = (files("fedu2.paper") / "published.yaml").read_text(encoding="utf-8")
    found: dict[str, dict[str, dict[str, list[float]]]] = yaml.safe_load(text)
    return found


def _table(name: str, title: str, protocols: Sequence[str]) -> Exhibit:
    """The rows that were published, and those that stand beside them where there are ten clients and α = 0.1."""
    cells = []
    for setting, rows in published()[name].items():
        beside = BESIDE if setting.endswith("-k10-a0.1") else ()
        cells += [cell(setting, row) for row in (*rows, *beside)]
    return Exhibit(title, protocols, cells)


HOME = "cifar10-k10-a0.1"
FIGURE_METHODS = tuple(cell(HOME, row) for row in ("fedbyol", "feddecorr-byol", "ldawa-byol", "fedu2-byol"))


def _lambda_series(row: str) -> Series:
    """The paper's weights, which has 0.1 where a row of ours has its own."""
    usual = cell(HOME, row).experiment(0).fur.weight
    weights = [share * usual for share in (0.0, 0.1, 0.5, 1.0, 2.0, 5.0)]
    return Series(ROWS[row].title, {weight: _lambda_cell(row, weight, usual) for weight in weights})


def _lambda_cell(row: str, weight: float, usual: float) -> Cell:
    known = {usual: row, 0.0: f"{row}-without-fur"}.get(weight, "")  # a cell of other exhibits, too
    return cell(HOME, known) if known in ROWS else cell(HOME, row, f"-lambda{weight:g}", **{"fur.weight": weight})


def _recipe_cell(row: str, key: str, value: float, mark: str) -> Cell:
    """The row with another value of one key of the recipe; with the recipe's own, the cell of the tables."""
    return cell(HOME, row) if value == RECIPE[key] else cell(HOME, row, f"-{mark}{value:g}", **{key: value})


def _figure4() -> Exhibit:
    series = [_lambda_series(row) for row in ("fedu2-byol", "fedu2-simsiam")]
    return Exhibit("Figure 4: the weight of FUR", ("linear",), series=series, axis="λ_U")


def _figure5(axis: str) -> Exhibit:
    rows = ("fedu2-simclr", "fedx-simclr")
    if axis == "E":
        series = [
            Series(ROWS[row].title, {e: _recipe_cell(row, "local_epochs", e, "e") for e in (5, 10, 20, 50)})
            for row in rows
        ]
        return Exhibit("Figure 5a: local epochs", ("linear",), series=series, axis="E, local epochs")
    series = [
        Series(ROWS[row].title, {k: cell(f"cifar10-k{k}-a0.1", row) for k in (5, 10, 20, 50, 100)}) for row in rows
    ]
    return Exhibit("Figure 5b: clients", ("linear",), series=series, axis="K, clients")


def _recipe_sweep(what: str, key: str, values: Sequence[float], mark: str, axis: str) -> Exhibit:
    """FedBYOL and FedU² with one key of the recipe at several values."""
    series = [
        Series(ROWS[row].title, {value: _recipe_cell(row, key, value, mark) for value in values})
        for row in ("fedbyol", "fedu2-byol")
    ]
    title = f"{what}: {setting_title(HOME)} (not in the paper)"
    return Exhibit(title, ("knn", "linear"), series=series, axis=axis)


def _rounds() -> Exhibit:
    """Whole runs, each with its own schedule: what a method makes of few rounds, and of many."""
    return _recipe_sweep("Few rounds and many", "rounds", (15, 30, 60, 100), "r", "rounds")


def _rates() -> Exhibit:
    """What a method makes of a rate that nobody tuned, as is usual where there are no labels to tune it by."""
    return _recipe_sweep("Learning rates", "optimizer.lr", (0.025, 0.05, 0.1, 0.2), "lr", "learning rate")


def _harder() -> Exhibit:
    """Clients that have images of two classes, or of one."""
    cells = [cell(f"cifar10-k10-c{classes}", row) for classes in (2, 1) for row in HARDER]
    return Exhibit("Harder partitions: clients of two classes and of one (not in the paper)", ("knn", "linear"), cells)


def tries(row: str) -> list[Cell]:
    """The short runs by which a method's own hyper-parameters are chosen, the default first."""
    common = {**RECIPE, **_setting(HOME), **ROWS[row].settings, **TRY_SETTINGS, **ROW_TRY_SETTINGS.get(row, {})}
    found = []
    for values in TRIES[row]:
        told = ", ".join(f"{key}={value}" for key, value in values.items())
        name = "-".join(str(value) for value in values.values()).lower()
        found.append(Cell("tuning", f"{row}-{name}", f"{ROWS[row].title}, {told}", {**common, **values}))
    return found


def _sample() -> Exhibit:
    """Rows on the embedded sample, with its own defaults: minutes on a CPU."""
    rows = ("fedbyol", "fedema-byol", "fedu2-byol")
    cells = [Cell("sample", row, ROWS[row].title, {"dataset": "sample", **ROWS[row].settings}) for row in rows]
    return Exhibit("The embedded sample (not in the paper)", tuple(PROTOCOLS), cells)


exhibits: Registry[Exhibit] = Registry("table or figure")
exhibits.register("table1")(
    _table("table1", "Table 1: linear probe and fine-tuning, α = 0.1", ("linear", "finetune 1 %", "finetune 10 %"))
)
exhibits.register("table2")(_table("table2", "Table 2: nearest neighbours, K = 10", ("knn",)))
for _number, _what in ((1, "spectrum"), (2, "sphere"), (3, "t-SNE")):
    exhibits.register(f"figure{_number}")(
        Exhibit(f"Figure {_number}: {_what} of four methods, from their runs", ("knn",), FIGURE_METHODS, of_runs=True)
    )
exhibits.register("figure4")(_figure4())
exhibits.register("figure5a")(_figure5("E"))
exhibits.register("figure5b")(_figure5("K"))
exhibits.register("rounds")(_rounds())
exhibits.register("rates")(_rates())
exhibits.register("harder")(_harder())
exhibits.register("tuning")(
    Exhibit("What methods were tuned to (not in the paper)", ("knn",), [each for row in TRIES for each in tries(row)])
)
exhibits.register("sample")(_sample())


def home_cells() -> list[Cell]:
    """The setting that both tables have, each row once, in the paper's order."""
    cells = {each.row: each for name in TABLES for each in exhibits[name].cells if each.setting == HOME}
    return [cells[row] for row in ROWS if row in cells]
