"""Training steps captured in CUDA graphs: the host launches one graph where it would launch a thousand kernels."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable

import torch

from fedu2.errors import first_line

__all__ = ["CapturedSteps"]

log = logging.getLogger("fedu2")

WARM_UP = 3  # steps before a capture: libraries choose their kernels in the first ones
WORTH_CAPTURING = 40  # steps on batches of an odd size before a graph is made for it: a capture costs about as much


class CapturedSteps:
    """Graphs of `step(size)` on one stream, by batch size and tempo (what else a step's kernels depend on).

    noise: the generator that the step draws from; each replay draws on from its current state, as a launched step does.
    """

    def __init__(self, step: Callable[[int], None], stream: torch.cuda.Stream, noise: torch.Generator) -> None:
        self.step, self.stream, self.noise = step, stream, noise
        self.graphs: dict[tuple[int, float], torch.cuda.CUDAGraph] = {}
        self.pool = torch.cuda.graph_pool_handle()  # shared: a stream replays one graph at a time
        self.launched: Counter[int] = Counter()
        self.refusal: str | None = None  # why a step could not be captured; no other is tried then

    def wants(self, size: int, tempo: float, usual: bool) -> bool:
        """Whether a graph for this size is missing and worth its capture; `usual` sizes always are."""
        often = usual or self.launched[size] >= WORTH_CAPTURING
        return self.refusal is None and often and (size, tempo) not in self.graphs

    def capture(self, size: int, tempo: float) -> None:
        """Make the graph. Trains a few steps: the caller puts the model back. Graphs of another tempo are dropped."""
        self.graphs = {key: graph for key, graph in self.graphs.items() if key[1] == tempo}
        try:
            with torch.cuda.stream(self.stream):
                for _ in range(WARM_UP):
                    self.step(size)
            graph = torch.cuda.CUDAGraph()
            graph.register_generator_state(self.noise)
            with torch.cuda.graph(graph, pool=self.pool, stream=self.stream):
                self.step(size)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            self.refusal = first_line(error)
            log.warning("the step cannot be captured in a CUDA graph (%s): it is launched anew each time", self.refusal)
            return
        self.graphs[size, tempo] = graph

    def __call__(self, size: int, tempo: float) -> None:
        """One step: replayed where there is a graph, else launched."""
        graph = self.graphs.get((size, tempo))
        if graph:
            graph.replay()
        else:
            self.launched[size] += 1
            self.step(size)
