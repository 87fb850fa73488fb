"""How long work takes on a GPU, without what the host takes to launch it."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable

import torch

__all__ = ["graph_seconds"]

WARM_UP, REPLAYS = 3, 21


def graph_seconds(work: Callable[[], object], calls: int = 1, generator: torch.Generator | None = None) -> float:
    """Seconds of one of `calls` calls in a captured graph: the median over replays, which follow without a gap.

    Work that is too short for the clock takes more calls; work that draws random numbers names its generator.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        work()  # compiles
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    if generator is not None:
        graph.register_generator_state(generator)
    with torch.cuda.graph(graph):
        for _ in range(calls):
            work()
    for _ in range(WARM_UP):
        graph.replay()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(REPLAYS + 1)]
    marks[0].record()
    for mark in marks[1:]:
        graph.replay()
        mark.record()
    torch.cuda.synchronize()
    return statistics.median(a.elapsed_time(b) for a, b in itertools.pairwise(marks)) / 1e3 / calls
