"""Training steps captured in CUDA graphs: the host launches one graph where it would launch a thousand kernels."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import torch

__all__ = ["CapturedSteps", "Verdict"]

log = logging.getLogger("fedu2")

WARM_UP = 3  # steps before a capture: libraries choose their kernels in the first ones
WORTH_CAPTURING = 40  # steps on batches of an odd size before a graph is made for it: a capture costs about as much


@dataclass
class Verdict:
    """Whether steps of this method can be captured; all lanes share it, so that it is found out, and told, once."""

    possible: bool = True


class CapturedSteps:
    """Graphs of `step(size)` on one stream, by batch size and tempo (what else a step's kernels depend on).

    noise: the generator that the step draws from; each replay draws on from its current state, as a launched step does.
    """

    def __init__(
        self, step: Callable[[int], None], stream: torch.cuda.Stream, noise: torch.Generator, verdict: Verdict
    ) -> None:
        self.step, self.stream, self.noise, self.verdict = step, stream, noise, verdict
        self.graphs: dict[tuple[int, float], torch.cuda.CUDAGraph] = {}
        self.pool = torch.cuda.graph_pool_handle()  # shared: a stream replays one graph at a time
        self.launched: Counter[int] = Counter()

    def wants(self, size: int, tempo: float, usual: bool) -> bool:
        """Whether a graph for this size is missing and worth its capture; `usual` sizes always are."""
        often = usual or self.launched[size] >= WORTH_CAPTURING
        return self.verdict.possible and often and (size, tempo) not in self.graphs

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
            reason = str(error).splitlines()[0]
            log.warning("this step cannot be captured in a CUDA graph (%s): it is launched anew each time", reason)
            self.verdict.possible = False
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
