"""Aggregators by name: how the server makes one model of many."""

from fedu2.aggregators import eua as _eua  # the files register their aggregators
from fedu2.aggregators import fedavg as _fedavg
from fedu2.aggregators.base import Aggregate, Aggregator, Updates, aggregators

__all__ = ["Aggregate", "Aggregator", "Updates", "aggregators"]

del _eua, _fedavg

aggregators.seal()
