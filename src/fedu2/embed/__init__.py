"""Vectors for anybody's pictures: `embed` sends them through a run's encoder and writes one file."""

from fedu2.embed.pipeline import embed
from fedu2.embed.results import Embedding

__all__ = ["Embedding", "embed"]
