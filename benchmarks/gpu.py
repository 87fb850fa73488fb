"""How fast is a federation on this GPU? `make bench-gpu`; one table is its last output.

    python -m benchmarks.gpu [--out results/bench] [--commit HASH] [--plain 20] [--only PART ...] [--quick]

Steps by objective with and without FUR, what each fast path brings, steps of every method beside plain BYOL's, rounds
of the paper's size at K = 10 and K = 100, aggregation, kNN, memory; and beside them, in the same run, the plain loop of
`benchmarks.plain_loop`. Images are noise, as speed does not depend on them; client sizes are those of a Dirichlet(0.1)
partition of ten balanced classes.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch
from benchmarks import plain_loop
from benchmarks.ceilings import copy_ceiling, matmul_ceiling

from fedu2.aggregators import Updates
from fedu2.aggregators.eua import eua
from fedu2.data import Dataset, ImageSet, make_partition
from fedu2.doctor import version_of
from fedu2.engine import LANES, Engine, usable_cores
from fedu2.evaluation import knn_accuracy
from fedu2.evaluation.monitor import evaluate, extract
from fedu2.experiment import Experiment
from fedu2.federation.callbacks import Callback
from fedu2.federation.local import LocalBackend
from fedu2.federation.rounds import initial_state, play_round
from fedu2.methods import ServerState, Task, build, methods, resolve
from fedu2.models.flat import FlatModel
from fedu2.options import EUAOptions

FORWARD_GFLOP = 2 * 0.557  # ResNet-18, one 32-pixel image
PASSES = {"simclr": 3, "simsiam": 3, "byol": 4}  # forward passes' worth of work, a view: 1 + 2 backward (+ 1 target)
PARTS = ("steps", "methods", "rounds", "aggregation", "knn", "plain")
VARIANTS: dict[str, dict[str, Any]] = {
    "no graph": {"engine.graph": False},
    "PyTorch's own kernels": {"engine.fused": False, "engine.compile": False},
    "torch.compile": {"engine.fused": False, "engine.compile": True},
    "float32": {"precision": "float32"},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("results/bench"))
    parser.add_argument("--commit", default="")
    parser.add_argument("--plain", type=float, default=20.0, help="seconds for each plain loop")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, help="what to measure; default: all")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to see that it runs; works on a CPU, too")
    arguments = parser.parse_args()
    bench = Bench(arguments.quick)
    record = {
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": arguments.commit or _commit(),
        "machine": machine(bench.device),
        "results": bench.run(arguments.only, arguments.plain),
    }
    if not arguments.quick:
        arguments.out.mkdir(parents=True, exist_ok=True)
        name = str(record["machine"]["device"]).lower().replace(" ", "-")
        path = arguments.out / f"{name}-{datetime.now(UTC):%Y%m%d-%H%M%S}.json"
        path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        print(f"\nwritten: {path}")
    print("\n" + table(record["results"]))


class Bench:
    """All measurements on one machine."""

    def __init__(self, quick: bool) -> None:
        self.quick = quick
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.images = 2_000 if quick else 50_000
        self.steps = 2 if quick else 150  # timed at a time
        generator = torch.Generator().manual_seed(0)
        shape = (self.images, 3, 32, 32)
        pixels = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
        labels = torch.arange(self.images) % 10
        self.host_images = pixels
        self.data = Dataset("noise", ImageSet(pixels, labels), ImageSet(pixels[::5], labels[::5])).to(self.device)

    def experiment(self, **keys: Any) -> Experiment:
        small = {"encoder": "tiny", "batch_size": 32} if self.quick else {}
        return resolve(
            Experiment.parse({"dataset": "cifar10", "method": "fedu2", "objective": "byol", **small, **keys})
        )

    def run(self, parts: Sequence[str], plain_seconds: float) -> dict[str, Any]:
        results: dict[str, Any] = {}
        measures: dict[str, Callable[[], Any]] = {
            "ceilings": self.ceilings,
            "steps": self.all_steps,
            "methods": self.all_methods,
            "rounds": self.rounds,
            "aggregation": self.aggregation,
            "knn": self.knn,
            "plain": lambda: self.plain(plain_seconds),
        }
        for name in ("ceilings", *(part for part in PARTS if part in parts)):
            measure = measures[name]
            began = time.perf_counter()
            results[name] = measure()
            print(f"{name}: {time.perf_counter() - began:.0f} s  {json.dumps(results[name])}", flush=True)
        return results

    def ceilings(self) -> dict[str, float]:
        sizes = ({"size": 256}, {"size": 10**6}) if self.quick else ({}, {})
        return {
            "matmul_tflops": matmul_ceiling(self.device, **sizes[0]),
            "copy_tbs": copy_ceiling(self.device, **sizes[1]),
        }

    def all_steps(self) -> list[dict[str, Any]]:
        rows = []
        for objective in ("byol", "simclr", "simsiam"):
            for weight in (0.0, 0.1):
                for lanes in (1, LANES):
                    rows.append(self.step(objective, weight, lanes))
        return rows + [self.step("byol", 0.1, 1, variant) for variant in VARIANTS]

    def step(self, objective: str, weight: float, lanes: int, variant: str = "") -> dict[str, Any]:
        """Milliseconds a step of FedU², with its share of the ceiling."""
        keys = {"fur.weight": weight, "engine.lanes": lanes, **(VARIANTS[variant] if variant else {})}
        experiment = self.experiment(objective=objective, clients=lanes, **keys)
        ms, _ = self.time_of(experiment)
        flop = 2 * experiment.batch_size * PASSES[objective] * FORWARD_GFLOP / 1e3  # TFLOP
        traits = (objective + (" + FUR" if weight else ""), f"{lanes} at once" if lanes > 1 else "", variant)
        label = ", ".join(trait for trait in traits if trait)
        print(f"  {label}: {ms:.3f} ms", flush=True)
        return {
            "label": label,
            "objective": objective,
            "fur": weight > 0,
            "lanes": lanes,
            "ms": ms,
            "samples_per_second": 1e3 * experiment.batch_size / ms,
            "tflops": 1e3 * flop / ms,
        }

    def time_of(self, experiment: Experiment) -> tuple[float, Engine]:
        """Milliseconds a step when each lane has one long client: the clock runs over all of them."""
        clients = experiment.clients
        method = build(experiment)
        shares = list(torch.arange(self.images).chunk(clients))
        backend = LocalBackend(method, self.data.train, shares)
        server = initial_state(method, self.device).server
        self.train(backend, server, clients, 1)  # captures
        steps = max(1, self.steps // clients)
        times = [self.train(backend, server, clients, steps) for _ in range(1 if self.quick else 3)]
        return 1e3 * statistics.median(times) / (steps * clients), backend.engine

    def all_methods(self) -> list[dict[str, Any]]:
        """Steps of every method with every objective, FedBYOL first; several clients at once, as in a run."""
        pairs = [(name, objective) for name in methods for objective in methods[name].objectives]
        pairs.sort(key=lambda pair: pair != ("fedbyol", "byol"))
        rows: list[dict[str, Any]] = []
        for name, objective in pairs:
            experiment = self.experiment(method=name, objective=objective, clients=LANES)
            ms, engine = self.time_of(experiment)
            print(f"  {name}, {objective}: {ms:.3f} ms", flush=True)
            ratio = ms / rows[0]["ms"] if rows else 1.0
            rows.append({"method": name, "objective": objective, "ms": ms, "ratio": ratio, "engine": engine.summary()})
        return rows

    def train(self, backend: LocalBackend, server: ServerState, clients: int, steps: int) -> float:
        tasks = [Task(round=1, client=k, steps=steps, lr=0.032, progress=0.0) for k in range(clients)]
        return self.timed(lambda: list(backend.run(tasks, server, {}, Callback())))

    def rounds(self) -> list[dict[str, Any]]:
        return [self.round(clients) for clients in ((10, 100) if not self.quick else (3,))]

    def round(self, clients: int) -> dict[str, Any]:
        """Rounds of FedU²-BYOL with E = 5, aggregation included; the median of rounds 2 and 3, and the first."""
        experiment = self.experiment(clients=clients, local_epochs=1 if self.quick else 5)
        method, shares = build(experiment), make_partition(self.data, experiment)
        gc.collect()  # models of earlier measurements refer to themselves
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        backend = LocalBackend(method, self.data.train, shares)
        state = initial_state(method, self.device)
        seconds = []
        for _ in range(3):
            began = time.perf_counter()
            state, record = play_round(state, method, backend, [len(share) for share in shares], Callback())
            self.wait()
            seconds.append(time.perf_counter() - began)
        model = FlatModel(method.learner(), self.device)
        model.load(state.server.model)
        evaluation = self.timed(lambda: evaluate(model.module, self.data, experiment))
        return {
            "clients": clients,
            "smaller_than_a_batch": sum(len(share) < experiment.batch_size for share in shares),
            "samples": record["samples"],
            "first_seconds": seconds[0],
            "seconds": statistics.median(seconds[1:]),
            "samples_per_second": record["samples"] / statistics.median(seconds[1:]),
            "evaluation_seconds": evaluation,
            "peak_gb": torch.cuda.max_memory_allocated() / 1e9 if self.device.type == "cuda" else None,
            "reserved_gb": torch.cuda.max_memory_reserved() / 1e9 if self.device.type == "cuda" else None,
        }

    def aggregation(self) -> dict[str, float]:
        """Seconds of EUA for K models of 15 M parameters."""
        size = 15_000 if self.quick else 15_000_000
        aggregate = eua(EUAOptions())
        found = {}
        for clients in (10, 100):
            start = torch.randn(size, device=self.device)
            models = torch.stack([start + 0.01 * torch.randn_like(start) for _ in range(clients)])
            updates = Updates(start, models, torch.full((clients,), 1 / clients, dtype=torch.float64))
            aggregate(updates)  # overwrites the models, which makes no difference to the time
            found[str(clients)] = self.timed(partial(aggregate, updates))
            del models, updates
        return found

    def knn(self) -> dict[str, float]:
        """Seconds of kNN for 10,000 queries against 50,000, 512 features; and of the encoder's passes before it."""
        queries, bank = len(self.data.test), len(self.data.train)
        features = torch.randn(queries + bank, 512, device=self.device)
        labels = torch.randint(0, 10, (queries + bank,), device=self.device)

        def classify() -> float:
            return knn_accuracy(features[:queries], labels[:queries], features[queries:], labels[queries:])

        classify()
        model = FlatModel(build(self.experiment()).learner(), self.device).module
        everything = torch.cat([self.data.train.images, self.data.test.images])
        extract(model.encoder, everything[:512])
        return {
            "seconds": self.timed(classify),
            "features_seconds": self.timed(lambda: extract(model.encoder, everything)),
        }

    def plain(self, seconds: float) -> list[dict[str, Any]]:
        rows = []
        small: dict[str, Any] = {"encoder": "tiny", "batch_size": 32, "workers": 0} if self.quick else {}
        for clients in (10, 100) if not self.quick else (3,):
            shares = make_partition(self.data, self.experiment(clients=clients))
            generator = torch.Generator().manual_seed(1)
            shares = [shares[k] for k in torch.randperm(clients, generator=generator).tolist()]
            result = plain_loop.measure(
                self.host_images, shares, "byol", self.device, 1.0 if self.quick else seconds, **small
            )
            rows.append({"clients": clients, **asdict(result)})
        return rows

    def timed(self, work: Callable[[], Any]) -> float:
        self.wait()
        began = time.perf_counter()
        work()
        self.wait()
        return time.perf_counter() - began

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def table(results: dict[str, Any]) -> str:
    """The figures for a reader."""
    ceiling = results["ceilings"]["matmul_tflops"]
    lines = [
        f"ceilings: {ceiling:.0f} TFLOP/s bf16 matrix product, {results['ceilings']['copy_tbs']:.2f} TB/s copy",
        "",
    ]
    if "steps" in results:
        lines.append(f"{'step, B = 128':34}{'ms':>8}{'samples/s':>12}{'of ceiling':>12}")
        for row in results["steps"]:
            speed = f"{row['ms']:8.2f}{row['samples_per_second']:12,.0f}{row['tflops'] / ceiling:12.0%}"
            lines.append(f"{row['label']:34}{speed}")
        lines.append("")
    if "methods" in results:
        lines.append(f"{'step of a method, B = 128':34}{'ms':>8}{'of FedBYOL':>12}")
        for row in results["methods"]:
            lines.append(f"{row['method'] + ', ' + row['objective']:34}{row['ms']:8.2f}{row['ratio']:12.2f}")
        lines.append("")
    if "rounds" in results:
        lines += _table_of_rounds(results)
    for clients, seconds in results.get("aggregation", {}).items():
        lines.append(f"{'EUA, 15 M parameters, K = ' + clients:34}{seconds:8.3f} s")
    if "knn" in results:
        lines.append(f"{'kNN, 10,000 against 50,000':34}{results['knn']['seconds']:8.3f} s")
        lines.append(f"{'features of 60,000 images':34}{results['knn']['features_seconds']:8.3f} s")
    return "\n".join(lines)


def _table_of_rounds(results: dict[str, Any]) -> list[str]:
    columns = f"{'s':>8}{'samples/s':>12}{'peak GB':>10}{'plain loop':>12}{'ratio':>8}"
    lines = [f"{'round of FedU²-BYOL, E = 5':34}{columns}"]
    plain = {row["clients"]: row["samples_per_second"] for row in results.get("plain", [])}
    for row in results["rounds"]:
        speed, beside = row["samples_per_second"], plain.get(row["clients"])
        against = f"{beside:12,.0f}{speed / beside:8.1f}" if beside else ""
        lines.append(
            f"{'K = ' + str(row['clients']):34}{row['seconds']:8.2f}{speed:12,.0f}{row['peak_gb'] or 0:10.2f}{against}"
        )
    return [*lines, ""]


def machine(device: torch.device) -> dict[str, str]:
    """What the figures depend on."""
    cuda = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if cuda else platform.machine(),
        "torch": torch.__version__,
        "cuda": str(torch.version.cuda),
        "cudnn": str(torch.backends.cudnn.version()),
        "triton": version_of("triton") or "–",
        "python": platform.python_version(),
        "cpu_cores": f"{usable_cores():g}",
    }


def _commit() -> str:
    found = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return found.stdout.strip()


if __name__ == "__main__":
    main()
