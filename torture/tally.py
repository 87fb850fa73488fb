"""What was seen: a row a kind of fault, a column an ending."""

from __future__ import annotations

from collections import Counter, defaultdict

__all__ = ["Tally"]


class Tally:
    """Counts of endings by kind of fault, and every broken promise in words."""

    def __init__(self) -> None:
        self.rows: dict[str, Counter[str]] = defaultdict(Counter)
        self.complaints: list[str] = []

    def add(self, row: str, ending: str) -> None:
        self.rows[row][ending] += 1

    def broken(self, complaint: str) -> None:
        self.complaints.append(complaint)

    def table(self) -> str:
        """As text, with a line of sums."""
        endings = [name for name in ("identical", "refused", "broken") if any(row[name] for row in self.rows.values())]
        total: Counter[str] = sum(self.rows.values(), Counter())
        width = max(map(len, [*self.rows, "all"]))
        lines = [" " * width + "".join(f"{name:>12}" for name in ["times", *endings])]
        for name, row in [*self.rows.items(), ("all", total)]:
            lines.append(f"{name:{width}}" + "".join(f"{n:>12}" for n in [row.total(), *(row[e] for e in endings)]))
        return "\n".join(lines)
