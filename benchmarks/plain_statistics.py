"""What batch-norm statistics of plain images are worth: python -m benchmarks.plain_statistics RUN [--out FILE]

A federation's encoder has the mean of its clients' running statistics, and those are of views: small crops with other
colours, and a client's variance is around its own mean. It is judged on whole images of all clients. Here the encoder
of a run is judged as it is, and with statistics of 40 batches of plain training images, drawn from all clients, in the
size in which it is judged; what it has learned stays the same.
"""

from __future__ import annotations

from typing import Any

from benchmarks.one_round import calibrate, tell

from fedu2 import Run
from fedu2.data import load_dataset
from fedu2.engine import choose, choose_device
from fedu2.evaluation.judge import Candidate, judge
from fedu2.evaluation.options import Protocols


def compare(run: Run) -> dict[str, Any]:
    """kNN and linear probe with either statistics."""
    experiment = run.experiment
    device = choose_device(experiment.device)
    dataset = load_dataset(experiment.dataset, experiment.data).to(device)
    encoder = run.encoder(device)
    candidate = Candidate(encoder, lambda seed: encoder, dataset.train, dataset.test, choose(experiment, device))
    found = {"views of each client": _scores(candidate)}
    calibrate(encoder, dataset.train.images, experiment.batch_size)
    found["plain images of all"] = _scores(candidate)
    return {"round": run.rounds_played, "scores": found, "experiment": experiment.flat()}


def _scores(candidate: Candidate) -> dict[str, float]:
    found = {name: score.mean for name, score in judge(candidate, ["knn", "linear"], Protocols(), [0]).items()}
    print(found, flush=True)
    return found


if __name__ == "__main__":
    tell(compare, __doc__)
