"""What does a process cost that trains next to nothing? Over Flower a site starts one for every message.

    python -m benchmarks.start [--repeats 3]

Processor time, for the clock tells of other processes, too. The last row is the same process with torch.optim.SGD
built in the end, as it would be in the beginning if clients used it: that imports torch's compiler (`PlainSGD`).
"""

from __future__ import annotations

import argparse
import resource
import statistics
import subprocess
import sys
import tempfile

TRAIN = (
    "import sys, fedu2; fedu2.train(fedu2.Experiment.parse({'dataset': 'sample', 'data.image_size': 16, 'clients': 2,"
    "'encoder': 'tiny', 'width': 4, 'rounds': 1, 'local_steps': 1, 'evaluation.every': 0, 'engine.threads': 1,"
    "'device': 'cpu'}), sys.argv[1])"
)
PROGRAMS = {
    "import torch": "import torch",
    "fedu2.train": TRAIN,
    "fedu2.train, torch.optim.SGD": f"{TRAIN}; import torch; torch.optim.SGD([torch.zeros(1)])",
}


def processor_seconds(program: str) -> float:
    """Of a Python process of its own, user and system together."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, "-c", program, f"{folder}/run"], check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    """The programs take turns, so that a busy machine slows all of them alike."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    turns = [[processor_seconds(p) for p in PROGRAMS.values()] for _ in range(parser.parse_args().repeats)]
    medians = [statistics.median(times) for times in zip(*turns, strict=True)]
    print(f"{'':30s}{'s':>8s}{'of fedu2.train':>17s}")
    for name, seconds in zip(PROGRAMS, medians, strict=True):
        print(f"{name:30s}{seconds:8.2f}{seconds / medians[1]:17.2f}")


if __name__ == "__main__":
    main()
