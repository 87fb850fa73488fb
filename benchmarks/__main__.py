"""All CPU benchmarks, one after another: `make bench`."""

from __future__ import annotations

from benchmarks import gradients, min_norm, start, transport, views

for benchmark in (transport, gradients, min_norm, views, start):
    print(f"\n{benchmark.__name__}\n")
    benchmark.main()
