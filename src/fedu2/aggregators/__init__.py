"""Aggregators by name: how the server makes one model of many."""

from fedu2.aggregators import eua, fedavg, ldawa  # noqa: F401 (the files register their aggregators)
from fedu2.aggregators.base import Aggregate, Aggregator, Buffers, Updates, aggregators, agreement

__all__ = ["Aggregate", "Aggregator", "Buffers", "Updates", "aggregators", "agreement"]

aggregators.seal()
