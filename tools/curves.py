"""kNN by round of several records, as a Markdown table: python tools/curves.py RECORD ..."""

from __future__ import annotations

import json
import sys
from pathlib import Path


def main(*paths: str) -> None:
    """A row a record."""
    records = {path: json.loads(Path(path).read_text(encoding="utf-8"))["history"] for path in paths}
    last = max(record["round"] for history in records.values() for record in history)
    print("| record |" + "".join(f" {round_} |" for round_ in range(last + 1)))
    print("| --- |" + " ---: |" * (last + 1))
    for path, history in records.items():
        knn = {record["round"]: record["knn"] for record in history if "knn" in record}
        cells = "".join(f" {knn[r]:.1f} |" if r in knn else "  |" for r in range(last + 1))
        print(f"| `{path.removeprefix('results/')}` |{cells}")


if __name__ == "__main__":
    main(*sys.argv[1:])
