"""What a round over Flower takes beyond training, on this machine: python -m benchmarks.flower [--nodes 3] [--rounds 4]

A SuperLink and SuperNodes on loopback, with TLS and node keys, and models of ResNet-18's size that train for one step
on two images. Per round: all seconds, those of the sites (from the message's arrival to its answer: decoding, images,
model, step), and the rest: starting a process at each site, importing, sending and checking.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path

import fedu2
from fedu2.experiment import Experiment
from fedu2.federation.flower.deployment import Deployment
from fedu2.federation.flower.init import write_app


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--methods", nargs="+", default=["fedsimclr", "fedbyol", "fedu2"])
    arguments = parser.parse_args()
    base = {
        "dataset": "sample", "data.image_size": 8, "encoder": "resnet18", "clients": arguments.nodes,
        "rounds": arguments.rounds, "local_steps": 1, "batch_size": 2, "evaluation.every": 0,
        "flower.server_data": "sample",
    }  # fmt: skip
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        nodes = [{"partition-id": number} for number in range(arguments.nodes)]
        with Deployment(place / "deployment", nodes, environment={"OMP_NUM_THREADS": "1"}) as deployment:
            for method in arguments.methods:
                for half in (False, True):
                    name = f"{method}-{'half' if half else 'full'}"
                    target = "shared" if method == "fedu2" else "auto"  # the longest message there is
                    settings = {**base, "method": method, "byol.target": target, "flower.half": half}
                    experiment = Experiment.parse(settings)
                    app = write_app(place / name, experiment, place / f"{name}-run")
                    assert deployment.run(app, {}, lambda line: None).completed
                    rows.append(_row(name, fedu2.Run(place / f"{name}-run")))
    print("method, parameters    MB a message   s a round   at the sites   beyond")
    for row in rows:
        figures = (row["megabytes"], row["seconds"], row["sites"], row["beyond"])
        print(f"{row['name']:20}" + "".join(f"{figure:14.1f}" for figure in figures))
    print(json.dumps(rows))


def _row(name: str, run: fedu2.Run) -> dict[str, float | str]:
    """Medians over the rounds after the first."""
    rounds = run.history[2:]
    seconds = statistics.median(line["seconds"] for line in rounds)
    sites = statistics.median(line["site_seconds"] for line in rounds)
    down = rounds[0]["bytes_down"] / len(rounds[0]["clients"]) / 1e6
    megabytes = down / 2 if name.endswith("half") else down
    return {"name": name, "megabytes": megabytes, "seconds": seconds, "sites": sites, "beyond": seconds - sites}


if __name__ == "__main__":
    main()
