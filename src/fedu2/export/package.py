"""From a run to a folder that can be given away: written beside its place, checked on real images, then moved there."""

from __future__ import annotations

import json
import logging
import shutil
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedu2._version import __version__
from fedu2.data import load_dataset
from fedu2.errors import FedU2Error, TrainingError, UsageError
from fedu2.evaluation.monitor import extract
from fedu2.experiment import Experiment
from fedu2.export.card import model_card
from fedu2.export.formats import Loaded
from fedu2.export.formats import formats as known
from fedu2.export.network import Network, network_of
from fedu2.files import flush, read_json, user_path
from fedu2.run import Run
from fedu2.rundir import RunDirectory
from fedu2.views import MEAN, STD, to_float

__all__ = ["export"]

log = logging.getLogger("fedu2")

KIND = "fedu2 encoder"  # by which an export is known
OURS = {"config.json", "README.md", "encoder.py", "encoder.safetensors", "encoder.onnx", "encoder.pt2"}
BATCHES = (1, 5, 26)  # images on which a written network is compared with the encoder
TOLERANCE = 1e-4


def export(
    run: Run,
    out: str | Path | None = None,
    formats: Sequence[str] = ("safetensors",),
    *,
    best: bool = False,
    force: bool = False,
) -> Path:
    """Write the encoder of the run's last checkpoint, or of its best round, in these `formats`; returns the folder.

    out: the folder, by default `export` inside the run.  force: replace an earlier export.  Each format is read back
    and compared with the encoder; nothing is left behind if one differs.
    """
    out = (user_path(out) if out is not None else run.path / "export").absolute()
    if not RunDirectory(run.path).begun():
        raise UsageError(f"{run.path} holds no run")
    experiment, chosen = run.experiment, {name: known[name] for name in formats}
    if not chosen:
        raise UsageError(f"name a format: {', '.join(known)}")
    for format_ in chosen.values():
        format_.check(experiment.encoder)
    _check_place(out, force)

    learner, round_ = run.model("cpu", best=best)
    encoder = learner.encoder
    network = network_of(encoder, experiment)
    images = _real_images(experiment)
    expected = extract(encoder, images)
    facts = _facts(run, network, expected.shape[1], round_, best)
    with _in_place_of(out, force) as draft:
        (draft / "config.json").write_text(json.dumps(facts, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        for name, format_ in chosen.items():
            format_.write(network, draft, facts)
            _compare(name, format_.load(draft), to_float(images), expected)
        (draft / "README.md").write_text(model_card(run, facts, chosen), encoding="utf-8")
    return out


def _facts(run: Run, network: Network, features: int, round_: int, best: bool) -> dict[str, Any]:
    """What config.json tells: how to use the network and where it comes from; no paths, no names of sites."""
    experiment = run.experiment
    return {
        "kind": KIND,
        "encoder": experiment.encoder,
        "width": getattr(network.module, "width", experiment.width),
        "features": features,
        "image_size": experiment.data.image_size,
        "mean": MEAN,
        "std": STD,
        "method": experiment.method,
        "objective": experiment.objective,
        "aggregator": experiment.aggregator,
        "dataset": experiment.dataset,
        "clients": experiment.clients,
        "round": round_,
        "best": best,
        "fedu2": __version__,
    }


def _real_images(experiment: Experiment) -> Tensor:
    """uint8 (N, 3, S, S): test images of the run where they still are, else of the embedded sample."""
    options = experiment.data.model_copy(update={"download": False})
    try:
        dataset = load_dataset(experiment.dataset, options)
    except (FedU2Error, OSError) as error:
        log.info("the export is checked on the embedded sample, for the run's images are not here: %s", error)
        dataset = load_dataset("sample", options)
    images = (dataset.test if len(dataset.test) else dataset.train).images
    count = sum(BATCHES)
    return images[:: max(1, len(images) // count)][:count]


def _compare(name: str, network: Loaded, images: Tensor, expected: Tensor) -> None:
    """No feature may differ by more than the tolerance."""
    if not bool(expected.isfinite().all()):
        raise TrainingError("the encoder gives features that are not finite, and is not exported")
    with torch.inference_mode():
        found = torch.cat([network(batch) for batch in _batches(images)])
    difference = float((found - expected).abs().max())
    if not difference <= TOLERANCE:
        largest = f"its largest feature is {float(expected.abs().max()):.3g}"
        raise TrainingError(
            f"the encoder written as {name} differs from the trained one by {difference:.2g} ({largest})"
        )
    log.debug("%s differs from the encoder by at most %.2g", name, difference)


def _batches(images: Tensor) -> Iterator[Tensor]:
    start = 0
    for size in BATCHES:
        if start < len(images):
            yield images[start : start + size]
        start += size


def _check_place(out: Path, force: bool) -> None:
    if out.exists() and not out.is_dir():
        raise UsageError(f"{out} is no directory")
    if not out.exists() or not any(out.iterdir()):
        return
    if not _is_export(out):
        raise UsageError(f"{out} is not empty and holds no export: choose another --out")
    if others := sorted({path.name for path in out.iterdir()} - OURS):
        raise UsageError(f"{out} holds more than an export ({others[0]}): choose another --out")
    if not force:
        raise UsageError(f"{out} holds an export already: --force replaces it, or choose another --out")


def _is_export(folder: Path) -> bool:
    try:
        return bool(read_json(folder / "config.json")["kind"] == KIND)
    except (OSError, ValueError, KeyError, TypeError):
        return False


@contextmanager
def _in_place_of(out: Path, force: bool) -> Iterator[Path]:
    """A folder beside `out` that takes its place when the block succeeds, and vanishes when it fails."""
    missing = [parent for parent in out.parents if not parent.exists()]
    draft, old = (out.with_name(f".{out.name}.{uuid.uuid4().hex}") for _ in range(2))
    for left in out.parent.glob(f".{out.name}.{'[0-9a-f]' * 32}"):
        if time.time() - left.stat().st_mtime > 3600:  # of a process that was killed
            shutil.rmtree(left, ignore_errors=True)
    draft.mkdir(parents=True)
    try:
        yield draft
        for path in (*draft.iterdir(), draft):
            flush(path)
        if out.exists():
            _check_place(out, force)  # another process may have been quicker
            out.rename(old)
        draft.rename(out)
    finally:
        if old.exists() and not out.exists():
            old.rename(out)  # the new one did not get there
        for left in (draft, old):
            shutil.rmtree(left, ignore_errors=True)
        with suppress(OSError):  # not empty: in use
            for made in missing:
                made.rmdir()
