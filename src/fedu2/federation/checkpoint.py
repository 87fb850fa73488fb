"""The state of a federation on disk: safetensors and JSON, written so that a crash at any moment loses nothing.

    checkpoint/round-000012/
        server.safetensors          θ_g and its buffers under the module's own names; `extra/NAME` of the method
        client-0003.safetensors     what client 3 remembers
        best.safetensors            the global model of the best round by kNN, where that is an earlier one
        manifest.json               round, experiment, and the size and SHA-256 of every file

A checkpoint is written beside its final place, flushed to the disk, and renamed: it is there whole or not at all. The
last two are kept, so that a damaged one has a predecessor to fall back to.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from fedu2.errors import TrainingError
from fedu2.federation.rounds import Best, FederationState
from fedu2.files import flush
from fedu2.methods import ServerState
from fedu2.models.flat import Layout, ModelState

__all__ = ["Checkpoints"]

log = logging.getLogger("fedu2")

FORMAT = 2
UNCHANGED = 1  # what clients remember is laid out otherwise since then; the rest is as it was
KEPT = 2


class Checkpoints:
    """The checkpoints in one directory, for models of one layout."""

    def __init__(self, directory: Path, layout: Layout, buffer_layout: Layout) -> None:
        self.directory = directory
        self.layout = layout
        self.buffer_layout = buffer_layout

    def save(self, state: FederationState, experiment: Mapping[str, Any]) -> Path:
        """Write `state`; afterwards older checkpoints may go."""
        place = self.directory / f"round-{state.round:06d}"
        draft = self.directory / f".{place.name}.{os.getpid()}"
        self.sweep()
        draft.mkdir(parents=True)
        try:
            save_file(self._server_tensors(state.server), draft / "server.safetensors")
            if state.best and state.best.round != state.round:
                save_file(self._server_tensors(ServerState(state.best.model)), draft / "best.safetensors")
            for client, memory in state.memories.items():
                tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in memory.items()}
                save_file(tensors, draft / f"client-{client:04d}.safetensors")
        except (SafetensorError, OSError) as error:
            self.sweep()
            raise TrainingError(f"the checkpoint of round {state.round} cannot be written: {error}") from None
        files = {path.name: _fingerprint(path) for path in sorted(draft.iterdir())}
        manifest = {"format": FORMAT, "round": state.round, "files": files, "experiment": dict(experiment)}
        manifest["best"] = {"round": state.best.round, "knn": state.best.knn} if state.best else None
        (draft / "manifest.json").write_text(json.dumps(manifest, indent=1), encoding="utf-8")
        for path in draft.iterdir():
            flush(path)
        flush(draft)
        shutil.rmtree(place, ignore_errors=True)  # of a round that is played again after falling back
        draft.rename(place)
        flush(self.directory)
        for old in self._places()[KEPT:]:
            shutil.rmtree(old, ignore_errors=True)
        return place

    def sweep(self) -> None:
        """Remove what a crash left half-written; only for the process that holds the run's lock."""
        for draft in self.directory.glob(".round-*"):
            shutil.rmtree(draft, ignore_errors=True)

    def latest(self, device: torch.device | str) -> tuple[FederationState, dict[str, Any], Path] | None:
        """The newest whole checkpoint: its state, the experiment that it belongs to, and its place."""
        damaged: list[str] = []
        for place in self._places():
            try:
                state, experiment = self._load(place, device)
            except TrainingError as error:
                log.warning("%s; falling back to the checkpoint before it", error)
                damaged.append(str(error))
                continue
            return state, experiment, place
        if damaged:
            raise TrainingError(f"no checkpoint in {self.directory} is whole: {'; '.join(damaged)}")
        return None

    def _places(self) -> list[Path]:
        return sorted((p for p in self.directory.glob("round-*") if p.is_dir()), reverse=True)

    def _load(self, place: Path, device: torch.device | str) -> tuple[FederationState, dict[str, Any]]:
        manifest = _read_manifest(place)
        for name, fingerprint in manifest["files"].items():
            path = place / name
            if not path.is_file() or _fingerprint(path) != fingerprint:
                raise TrainingError(f"checkpoint file {path} is {'damaged' if path.exists() else 'missing'}")
        try:
            server = self._server_state(load_file(place / "server.safetensors", str(device)), device)
            memories = {
                int(path.stem.removeprefix("client-")): load_file(path, str(device))
                for path in sorted(place.glob("client-*.safetensors"))
            }
            best = self._best(place, manifest, server, device)
        except (SafetensorError, OSError, KeyError, ValueError, RuntimeError) as error:
            raise TrainingError(f"checkpoint {place} does not fit this model: {error}") from None
        return FederationState(int(manifest["round"]), server, memories, best), manifest["experiment"]

    def _best(
        self, place: Path, manifest: Mapping[str, Any], server: ServerState, device: torch.device | str
    ) -> Best | None:
        told = manifest.get("best")
        if not told:
            return None
        if told["round"] != manifest["round"]:
            server = self._server_state(load_file(place / "best.safetensors", str(device)), device)
        return Best(int(told["round"]), float(told["knn"]), server.model)

    def _server_tensors(self, server: ServerState) -> dict[str, Tensor]:
        tensors = dict(self.layout.views(server.model.params.cpu()))
        tensors |= dict(self.buffer_layout.views(server.model.buffers.cpu()))
        tensors |= {f"extra/{name}": tensor.cpu() for name, tensor in server.extra.items()}
        return {name: tensor.contiguous() for name, tensor in tensors.items()}

    def _server_state(self, tensors: Mapping[str, Tensor], device: torch.device | str) -> ServerState:
        extra = {name.removeprefix("extra/"): t for name, t in tensors.items() if name.startswith("extra/")}
        return ServerState(
            ModelState(self.layout.vector(tensors, device), self.buffer_layout.vector(tensors, device)), extra
        )


def _read_manifest(place: Path) -> dict[str, Any]:
    path = place / "manifest.json"
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        whole = (
            isinstance(manifest["files"], dict)
            and "server.safetensors" in manifest["files"]
            and isinstance(manifest["experiment"], dict)
            and place.name == f"round-{manifest['round']:06d}"
        )
    except (OSError, ValueError, KeyError, TypeError):
        whole = False
    if not whole:
        raise TrainingError(f"checkpoint file {path} is missing or damaged")
    remembers = any(name.startswith("client-") for name in manifest["files"])
    if manifest.get("format") not in (FORMAT, *([] if remembers else [UNCHANGED])):
        raise TrainingError(f"checkpoint {place} has format {manifest.get('format')}; this version reads {FORMAT}")
    return dict(manifest)


def _fingerprint(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}
