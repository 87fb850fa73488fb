"""Write what the records say: docs/results.md, results in README.md, and recipes/: python tools/publish.py

Files are written whole, and only where they change. Recipes whose records are gone are removed; those that were not
written here are left alone.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean

import yaml

from fedu2.errors import UsageError
from fedu2.experiment import Experiment
from fedu2.files import write_atomically
from fedu2.paper.campaign import SCORES, Campaign
from fedu2.paper.page import emphasised, gather, judged, machines, minutes, page
from fedu2.paper.plan import HOME, OWN_TABLES, PROTOCOLS, TABLES, Cell, exhibits, home_cells, published, setting_title
from fedu2.paper.records import Record
from fedu2.paper.rows import RECIPE, ROWS
from fedu2.paper.tables import Found, Sheet, finished, markdown, measured, shown_score
from fedu2.parsing import tree

ROOT = Path(__file__).parents[1]
BEGIN, END = "<!-- results: written by `make results` -->", "<!-- end of results -->"
MARK = "# Written by tools/publish.py from the plan and the records."
HEADLINE = ("knn", "linear")  # protocols of the README's table
ALWAYS = f"{HOME}/fedu2-byol"


def main(root: Path = ROOT) -> None:
    """Bring the files of a checkout up to date."""
    wanted = rendered(root)
    for path in stale(root, wanted):
        path.unlink()
        print(f"removed {path.relative_to(root)}")
        if not any(path.parent.iterdir()):
            path.parent.rmdir()
    for path, text in wanted.items():
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            write_atomically(path, text)
            print(f"wrote {path.relative_to(root)}")


def rendered(root: Path) -> dict[Path, str]:
    """Every file as it is to be."""
    found = gather(root / "results" / "paper")
    readme = root / "README.md"
    return {
        root / "docs" / "results.md": page(found),
        readme: with_block(readme.read_text(encoding="utf-8"), headline(found) + pictures(root)),
        **{root / name: text for name, text in recipes(found).items()},
    }


def with_block(text: str, block: str) -> str:
    """The text with `block` between its two markers."""
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        raise UsageError(f"README.md needs the lines {BEGIN} and {END}, once each")
    before, after = text.partition(BEGIN)[0], text.partition(END)[2]
    return f"{before}{BEGIN}\n\n{block}\n{END}{after}"


def headline(found: Mapping[Cell, Found]) -> str:
    """Both tables' columns of their common setting, for those who read no further."""
    ordered = home_cells()
    records = {cell: finished(found[cell]) for cell in ordered}
    if not any(records.values()):
        return (
            f"There is no finished record of {setting_title(HOME)} yet; [the results](docs/results.md) show what there "
            "is, and fill up as records come.\n"
        )
    header = ["method", *(title for p in HEADLINE for title in (PROTOCOLS[p], "paper")), "seeds", "minutes"]
    rows = [_headline_row(cell, records[cell]) for cell in ordered]
    known = [row for row in rows if any(row[1:])]
    timed = [record for some in records.values() for record in judged(some, HEADLINE)]
    where = f" Minutes are those of one run, trained and judged, on {'; '.join(machines(timed))}." if timed else ""
    return (
        f"{setting_title(HOME)}, accuracy in percent: ours, as far as there are records, beside the paper's, as far "
        f"as it has them; the best of ours in bold.{where} [All results](docs/results.md).\n\n"
        + markdown(emphasised(Sheet("", header, known)))
    )


def pictures(root: Path) -> str:
    """What `tools/pictures.py` drew, with what its numbers say; nothing where there are none."""
    path = root / "results" / "pictures.json"
    if not path.exists():
        return ""
    shown = json.loads(path.read_text(encoding="utf-8"))
    titles = [ROWS[each["cell"].rpartition("/")[2]].title for each in shown]
    when = {f"round {each['round']} of {each['rounds']}" for each in shown}
    ranks = [(each["effective_rank"]["global"], mean(each["effective_rank"]["local"])) for each in shown]
    alike = [mean(each["linear_cka_to_global"]) for each in shown]
    uniform = [f"{a:.0f} and {b:.0f} ({title})" for title, (a, b) in zip(titles, ranks, strict=True)]
    unified = [f"{value:.2f} ({title})" for title, value in zip(titles, alike, strict=True)]
    earlier = any(each["rounds"] != RECIPE["rounds"] for each in shown)
    other = "Pictures of models that were trained by an earlier recipe, not of those in the table. " if earlier else ""
    return (
        f"\n{other}The representations of {shown[0]['images']} test images in {' and '.join(sorted(when))}, by the "
        "global model and by local models after one more round of training.\n\n"
        "Uniform? Their spectrum: the flatter, the more directions are in use; random directions make the dotted line. "
        f"Effective ranks, of the global model and of local ones in the mean: {'; '.join(uniform)}.\n\n"
        "![Singular values of representations, global and local](docs/pictures/spectrum.png)\n\n"
        "Unified? Images as the global model (circles) and local ones (crosses) see them, by t-SNE. Likeness of local "
        f"models to the global one, by linear CKA, in which 1 is alike: {'; '.join(unified)} in the mean.\n\n"
        "![t-SNE of global and local representations](docs/pictures/tsne.png)\n"
    )


def _headline_row(cell: Cell, records: Sequence[Record]) -> list[str]:
    scores = [measured(records, protocol) for protocol in HEADLINE]
    figures = [
        text
        for protocol, ours in zip(HEADLINE, scores, strict=True)
        for text in (shown_score(ours), _papers(cell, protocol))
    ]
    counts = sorted({len(score.values) for score in scores} - {0})
    return [cell.title, *figures, "/".join(map(str, counts)), minutes(judged(records, HEADLINE))]


def _papers(cell: Cell, protocol: str) -> str:
    """The published figure of a cell, whichever table has it."""
    for name in TABLES:
        theirs = published()[name].get(cell.setting, {}).get(cell.row)
        if theirs and protocol in exhibits[name].protocols:
            return f"{theirs[list(exhibits[name].protocols).index(protocol)]:.2f}"
    return ""


def stale(root: Path, wanted: Mapping[Path, str]) -> list[Path]:
    """Recipes that were written here, and would not be any more."""
    there = sorted((root / "recipes").glob("*/*.yaml"))
    return [path for path in there if path not in wanted and MARK in path.read_text(errors="replace").splitlines()]


def recipes(found: Mapping[Cell, Found]) -> dict[str, str]:
    """By path: a recipe for every cell of the tables that has a finished record, and for one that always has."""
    cells = dict.fromkeys(cell for name in (*TABLES, *OWN_TABLES) for cell in exhibits[name].cells)
    records = {cell: finished(found[cell]) for cell in cells}
    return {path_of(cell): recipe(cell, own) for cell, own in records.items() if own or cell.name == ALWAYS}


def path_of(cell: Cell) -> str:
    return f"recipes/{cell.name}.yaml"


def recipe(cell: Cell, records: Sequence[Record]) -> str:
    """What the cell is, how its row is made again, how long that takes, and its configuration."""
    tables = [name for name in (*TABLES, *OWN_TABLES) if cell in exhibits[name].cells]
    seeds = ",".join(map(str, sorted(record.seed for record in records)))
    chosen = f" --seeds {seeds}" if seeds not in ("", "0") else ""  # 0 is what it runs by itself
    timed = judged(records, [protocol for name in tables for protocol in exhibits[name].protocols])
    time = f"{minutes(timed)} minutes a run, on {'; '.join(machines(timed))}" if timed else "not measured yet"
    return f"""# {cell.title}: {setting_title(cell.setting)}; a row of {" and ".join(tables)}.
{MARK}
#
# Its row, trained and judged, beside the records of this repository:
#     fedu2 paper run {tables[0]} --cells {cell.name}{chosen}{_as(records)} --results runs/records data.root=PATH
# The training by itself:
#     fedu2 train --config {path_of(cell)} data.root=PATH
# Time, training and judging: {time}.
{body(cell)}"""


def _as(records: Sequence[Record]) -> str:
    """What else `paper run` is given to train and judge as it was for these records, if that is not its default."""
    entries = [entry for record in records for entry in record.content["evaluation"]]
    if not entries:
        return ""
    scored = {entry["protocol"].partition(" ")[0] for entry in entries}  # "finetune 1 %" is of finetune
    names = [name for name in SCORES if name in scored]
    repetitions = max(int(entry["seeds"]) for entry in entries)
    lanes = {record.content["experiment"].get("engine.lanes", "auto") for record in records}
    options = [
        *(f"--protocol {name}" for name in names if tuple(names) != Campaign.protocols),
        *([f"--protocol-seeds {repetitions}"] if repetitions != Campaign.protocol_seeds else []),
        *(f"engine.lanes={n}" for n in lanes if len(lanes) == 1 and isinstance(n, int)),
    ]
    return "".join(f" {option}" for option in options)


def body(cell: Cell) -> str:
    """The cell's configuration as YAML: its method, and whatever is not the default."""
    values = Experiment.parse(cell.values).flat()
    defaults = Experiment.parse({"dataset": values["dataset"]}).flat()
    own = {key: value for key, value in values.items() if key in ("method", "dataset") or value != defaults[key]}
    return yaml.safe_dump(tree(Experiment, own), sort_keys=False, allow_unicode=True, default_flow_style=None)


if __name__ == "__main__":
    main()
