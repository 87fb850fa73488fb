"""Main effects of a two-level design on the final kNN: python tools/effects.py RECORD

A factor is a set of keys of the configuration that change together between two levels; its effect is the mean over the
runs at its higher level minus that over the others. Runs called `row-…` are the design.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def main(path: str) -> None:
    runs = json.loads(Path(path).read_text(encoding="utf-8"))
    design = [run for run in runs if run["name"].startswith("row-")]
    print(f"{'factor':<28}{'low':>12}{'high':>12}{'effect':>9}{'projector rank':>16}")
    for keys, levels in factors([flat(run["config"]) for run in design]).items():
        low, high = sorted(set(levels), key=str)
        sides = [[run for run, level in zip(design, levels, strict=True) if level == side] for side in (low, high)]
        knn, rank = (
            statistics.fmean(final(run, name) for run in sides[1])
            - statistics.fmean(final(run, name) for run in sides[0])
            for name in ("knn", "projector_rank")
        )
        print(f"{keys:<28}{low!s:>12}{high!s:>12}{knn:9.2f}{rank:16.1f}")
    for run in runs:
        print(f"{run['name']:<10} kNN {final(run, 'knn'):.2f}, projector rank {final(run, 'projector_rank'):.0f}")


def factors(configs: list[dict[str, Any]]) -> dict[str, list[Any]]:
    """The keys that vary, by name, with their level in every run; of keys that vary together, the first."""
    varying = {
        key: [json.dumps(config.get(key)) for config in configs] for key in sorted({k for c in configs for k in c})
    }
    found: dict[tuple[str, ...], tuple[str, list[Any]]] = {}
    for key, levels in varying.items():
        if len(set(levels)) == 2:
            pattern = tuple(str(level == levels[0]) for level in levels)
            found.setdefault(pattern, (key, levels))
    return dict(found.values())


def flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Dotted keys."""
    found: dict[str, Any] = {}
    for key, value in config.items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {prefix + key: value}
    return found


def final(run: Mapping[str, Any], name: str) -> float:
    return float(run["history"][-1][name])


if __name__ == "__main__":
    main(*sys.argv[1:])
