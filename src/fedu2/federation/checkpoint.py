"""The state of a federation on disk: safetensors and JSON, written so that a crash at any moment loses nothing.

    checkpoint/round-000012/
        server.safetensors          θ_g and its buffers under the module's own names; `extra/NAME` of the method
        velocity.safetensors        v of the server's step, where that is longer than 1 or has momentum
        client-0003.safetensors     what client 3 remembers
        best.safetensors            the global model of the best round by kNN, where that is an earlier one
        manifest.json               round, experiment, the size and SHA-256 of every file, what the images and their
                                    partition are known by, and its own digest
    checkpoint/metrics.jsonl        the records of all rounds; how much of it belongs to a checkpoint is in its manifest

A checkpoint is written beside its final place, flushed to the disk, and renamed: it is there whole or not at all. The
last two are kept, so that a damaged one has a predecessor to fall back to.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from fedu2.errors import TrainingError
from fedu2.federation.journal import Journal
from fedu2.federation.rounds import Best, FederationState
from fedu2.files import digest_of, flush, naming, opened, read_json
from fedu2.methods import ServerState
from fedu2.models.flat import Layout, ModelState

__all__ = ["Checkpoints", "newest_manifest", "places"]

log = logging.getLogger("fedu2")

FORMAT = 2
PLACE, DRAFT = re.compile(r"round-[0-9]{6,}"), re.compile(r"\.round-[0-9]{6,}\.[0-9]+")  # others are the user's
UNCHANGED = 1  # what clients remember is laid out otherwise since then; the rest is as it was


class Checkpoints:
    """The checkpoints in one directory, for models of one layout."""

    def __init__(self, directory: Path, layout: Layout, buffer_layout: Layout) -> None:
        self.directory = directory
        self.layout = layout
        self.buffer_layout = buffer_layout
        self.journal = Journal(directory / "metrics.jsonl")
        self.last: Path | None = None  # the last whole one that was written or read

    def save(
        self,
        state: FederationState,
        experiment: Mapping[str, Any],
        history: Sequence[Mapping[str, Any]] = (),
        data: Mapping[str, str] | None = None,
    ) -> Path:
        """Write `state`, and the records of rounds since the last checkpoint; afterwards older ones may go.

        data: what images and partition are known by.
        """
        place = self.directory / f"round-{state.round:06d}"
        draft = self.directory / f".{place.name}.{os.getpid()}"
        self.sweep()
        try:
            with naming(draft):
                self._write(draft, state, experiment, history, data or {})
                shutil.rmtree(place, ignore_errors=True)  # a damaged one, of a round that is played again
                draft.rename(place)
                flush(self.directory)
                flush(self.directory.parent)
                self.journal.commit()
        except (SafetensorError, OSError) as error:
            self.sweep()
            raise TrainingError(f"the checkpoint of round {state.round} cannot be written: {error}") from None
        for old in places(self.directory):  # a damaged one is no predecessor, whatever its round
            if old not in (place, self.last):
                shutil.rmtree(old, ignore_errors=True)
        self.last = place
        return place

    def _write(
        self,
        draft: Path,
        state: FederationState,
        experiment: Mapping[str, Any],
        history: Sequence[Mapping[str, Any]],
        data: Mapping[str, str],
    ) -> None:
        draft.mkdir(parents=True)
        save_file(self._server_tensors(state.server), draft / "server.safetensors")
        if state.best and state.best.round != state.round:
            save_file(self._server_tensors(ServerState(state.best.model)), draft / "best.safetensors")
        if state.velocity is not None:
            save_file(_separate(self.layout.views(state.velocity.cpu())), draft / "velocity.safetensors")
        for client, memory in state.memories.items():
            tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in memory.items()}
            save_file(tensors, draft / f"client-{client:04d}.safetensors")
        files = {path.name: _fingerprint(path) for path in sorted(draft.iterdir())}
        manifest = {"format": FORMAT, "round": state.round, "files": files, "experiment": dict(experiment)}
        manifest["best"] = {"round": state.best.round, "knn": state.best.knn} if state.best else None
        manifest["seen"] = {str(client): list(models) for client, models in state.seen.items()}
        manifest["data"] = dict(data)
        manifest["metrics"] = self.journal.write(history)
        manifest["digest"] = digest_of(manifest)
        (draft / "manifest.json").write_text(json.dumps(manifest, indent=1), encoding="utf-8")
        for path in draft.iterdir():
            flush(path)
        flush(draft)

    def sweep(self) -> None:
        """Remove what a crash left half-written; only for the process that holds the run's lock."""
        for draft in self.directory.glob(".*"):
            if DRAFT.fullmatch(draft.name):
                shutil.rmtree(draft, ignore_errors=True)
        self.journal.sweep()

    def latest(
        self, device: torch.device | str, spare: Path | None = None
    ) -> tuple[FederationState, dict[str, Any], Path] | None:
        """The newest whole checkpoint: its state, the experiment that it belongs to, and its place.

        spare: to go on with the run, the records must be whole, too, there or in the journal.
        """
        damaged: list[str] = []
        for place in places(self.directory):
            try:
                state, experiment = self._load(place, device)
                if spare is not None:
                    self.records(place, spare)
            except TrainingError as error:
                log.warning("%s; falling back to the checkpoint before it", error)
                damaged.append(str(error))
                continue
            self.last = place
            return state, experiment, place
        if damaged:
            raise TrainingError(f"no checkpoint in {self.directory} is whole: {'; '.join(damaged)}")
        return None

    def records(self, place: Path, spare: Path) -> bytes | None:
        """The lines of a checkpoint's rounds, from the journal or from `spare`; None of an earlier version."""
        mark = _read_manifest(place).get("metrics")
        return None if mark is None else self.journal.records(mark, spare)

    def _load(self, place: Path, device: torch.device | str) -> tuple[FederationState, dict[str, Any]]:
        manifest = _read_manifest(place)
        for name, fingerprint in manifest["files"].items():
            _check(place / name, fingerprint)
        try:
            server = self._server_state(place / "server.safetensors", device)
            memories = {
                int(name.removeprefix("client-").partition(".")[0]): load_file(place / name, str(device))
                for name in sorted(manifest["files"])
                if name.startswith("client-")
            }
            best = self._best(place, manifest, server, device)
            velocity = self._velocity(place, manifest, device)
            seen = {int(client): tuple(models) for client, models in manifest.get("seen", {}).items()}
        except (SafetensorError, OSError, KeyError, TypeError, ValueError, OverflowError, RuntimeError) as error:
            raise TrainingError(f"checkpoint {place} does not fit this model: {error}") from None
        return FederationState(int(manifest["round"]), server, memories, best, seen, velocity), manifest["experiment"]

    def _best(
        self, place: Path, manifest: Mapping[str, Any], server: ServerState, device: torch.device | str
    ) -> Best | None:
        told = manifest.get("best")
        if not told:
            return None
        if told["round"] != manifest["round"]:
            server = self._server_state(place / "best.safetensors", device)
        return Best(int(told["round"]), float(told["knn"]), server.model)

    def _velocity(self, place: Path, manifest: Mapping[str, Any], device: torch.device | str) -> Tensor | None:
        path = place / "velocity.safetensors"
        if path.name in manifest["files"]:
            velocity = self.layout.vector(load_file(path, str(device)), device)
            _check_finite(path, velocity)
            return velocity
        if manifest["round"] > 0 and manifest["experiment"].get("server.momentum"):  # earlier versions had no such key
            raise ValueError(f"{path.name} is missing, and the server's step has momentum")
        return None

    def _server_tensors(self, server: ServerState) -> dict[str, Tensor]:
        params = self.layout.views(server.model.params.cpu())
        buffers = self.buffer_layout.views(server.model.buffers.cpu())
        extra = ((f"extra/{name}", tensor.cpu()) for name, tensor in server.extra.items())
        return _separate(chain(params, buffers, extra))

    def _server_state(self, path: Path, device: torch.device | str) -> ServerState:
        tensors = load_file(path, str(device))
        extra = {name.removeprefix("extra/"): t for name, t in tensors.items() if name.startswith("extra/")}
        model = ModelState(self.layout.vector(tensors, device), self.buffer_layout.vector(tensors, device))
        _check_finite(path, model.params, model.buffers)
        return ServerState(model, extra)


def places(directory: Path) -> list[Path]:
    """The checkpoints in a directory, whole or not, the newest first."""
    found = [place for place in directory.glob("round-*") if PLACE.fullmatch(place.name) and place.is_dir()]
    return sorted(found, key=lambda place: int(place.name[6:]), reverse=True)


def newest_manifest(directory: Path) -> tuple[dict[str, Any], Path] | None:
    """What the newest checkpoint tells whose manifest is whole, and its place."""
    for place in places(directory):
        try:
            return _read_manifest(place), place
        except TrainingError:
            continue
    return None


def _read_manifest(place: Path) -> dict[str, Any]:
    path = place / "manifest.json"
    try:
        manifest = read_json(path)
        whole = (
            isinstance(manifest["files"], dict)
            and all(Path(name).name == name for name in manifest["files"])  # none leads out of its place
            and "server.safetensors" in manifest["files"]
            and isinstance(manifest["experiment"], dict)
            and place.name == f"round-{manifest['round']:06d}"
            and manifest.pop("digest", None) in (None, digest_of(manifest))  # earlier versions wrote none
        )
    except (OSError, ValueError, KeyError, TypeError):
        whole = False
    if not whole:
        raise TrainingError(f"checkpoint file {path} is missing or damaged")
    remembers = any(name.startswith("client-") for name in manifest["files"])
    if manifest.get("format") not in (FORMAT, *([] if remembers else [UNCHANGED])):
        raise TrainingError(f"checkpoint {place} has format {manifest.get('format')}; this version reads {FORMAT}")
    return dict(manifest)


def _check(path: Path, fingerprint: Any) -> None:
    try:
        whole = path.stat().st_size == fingerprint["bytes"] and _fingerprint(path) == fingerprint
    except FileNotFoundError:
        raise TrainingError(f"checkpoint file {path} is missing") from None
    except OSError as error:
        raise TrainingError(f"checkpoint file {path} cannot be read: {error.strerror or error}") from None
    except (KeyError, TypeError):
        whole = False
    if not whole:
        raise TrainingError(f"checkpoint file {path} is damaged")


def _check_finite(path: Path, *vectors: Tensor) -> None:
    if not all(bool(vector.isfinite().all()) for vector in vectors):
        raise ValueError(f"{path.name} holds numbers that are not finite")


def _separate(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """Named tensors, each in memory of its own where it was not in one piece."""
    return {name: tensor.contiguous() for name, tensor in tensors}


def _fingerprint(path: Path) -> dict[str, Any]:
    with opened(path) as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}
