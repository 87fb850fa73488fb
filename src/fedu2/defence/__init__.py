"""Client updates are not trusted: what is refused (`inspect`), bounded (`bounds`) and outvoted (`rules`).

Between the replies of a round and its aggregator. Clients in our own processes are inspected by nobody (a model that is
not finite is our own failure there, and stops the run) and bounded or outvoted where the experiment asks for it.
"""

from fedu2.defence.base import Arrivals
from fedu2.defence.bounds import bounded
from fedu2.defence.inspect import inspected, misfit
from fedu2.defence.rules import Rule, rules, selected

__all__ = ["Arrivals", "Rule", "bounded", "inspected", "misfit", "rules", "selected"]
