"""What a site remembers, on a disk of its own: sealed, so that what is damaged or lost is told and not trained with.

    round-000003-5f1c09ab3e7d2846.safetensors   the memory after round 3, with the beginning of its checksum
    manifest.json                               file, size and SHA-256 of every memory that is kept, by round; null for
                                                the first there ever was, where that is forgotten; its own digest

A memory is written under a name of its own, and counts when the manifest that names it takes the place of the one
before: a crash at any moment leaves what was, or what is. What no manifest names is a leftover of such a crash.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load, save

from fedu2.errors import TrainingError
from fedu2.files import atomic_file, digest_of, read_bytes, read_json, write_atomically
from fedu2.methods import Memory

__all__ = ["DiskMemory"]

log = logging.getLogger("fedu2")

FORMAT = 1
MANIFEST = "manifest.json"
SEALED = re.compile(r"round-[0-9]{6,}-[0-9a-f]{16}\.safetensors")
UNSEALED = re.compile(r"round-([0-9]{6,})\.safetensors")  # as earlier versions wrote them

Kept = Mapping[int, Mapping[str, Any] | None]
"""What a manifest tells of the memory after each round: `file`, `bytes`, `sha256`; None where it is forgotten."""


@dataclass(frozen=True)
class DiskMemory:
    """The memories in one directory; they outlive a Flower run."""

    folder: Path

    def rounds(self) -> list[int]:
        """After which rounds there is one, or was the first: who is set back behind all that are kept asks for that."""
        return sorted(self._kept())

    def read(self, round_: int) -> Memory:
        """As it was written; TrainingError where that cannot be had."""
        told = self._kept().get(round_)
        if told is None:
            raise self._trouble(f"the memory after round {round_} is not kept any more")
        try:
            content = _content(self.folder / told["file"])
            if {**told, **_seal(content)} != told:
                raise ValueError("its checksum does not match")
            return load(content)
        except FileNotFoundError:
            raise self._trouble(f"{told['file']} is missing") from None
        except (OSError, ValueError, SafetensorError) as error:
            raise self._trouble(f"{told['file']} is damaged: {error}") from None

    def write(self, round_: int, memory: Memory) -> None:
        content = save({name: tensor.detach().cpu().contiguous() for name, tensor in memory.items()})
        seal = _seal(content)
        name = f"round-{round_:06d}-{seal['sha256'][:16]}.safetensors"
        kept = self._kept()
        if not kept:
            self._keep(kept, {})  # from here on, a memory without a manifest is one that has lost it
        with atomic_file(self.folder / name) as temporary:
            temporary.write_bytes(content)
        self._keep({**kept, round_: {"file": name, **seal}}, kept)

    def forget(self, round_: int) -> None:
        """Give one up. Of the first it stays known that there was one."""
        before = self._kept()
        kept = {made: told for made, told in before.items() if made != round_}
        if not any(made < round_ for made in kept):
            kept[round_] = None
        if kept != before:
            self._keep(kept, before)

    def _kept(self) -> Kept:
        try:
            manifest = read_json(self.folder / MANIFEST)
            whole = manifest.pop("digest") == digest_of(manifest) and manifest["format"] == FORMAT
            kept = {int(made): told for made, told in manifest["memories"].items()}
            whole = whole and all(_names_a_memory(told) for told in kept.values())
        except FileNotFoundError:
            return self._unsealed()
        except OSError as error:
            raise self._trouble(f"{MANIFEST} cannot be read: {error.strerror or error}") from None
        except (ValueError, KeyError, TypeError, AttributeError):
            whole = False
        if not whole:
            raise self._trouble(f"{MANIFEST} is damaged, or of another version")
        return kept

    def _unsealed(self) -> Kept:
        """Where there is no manifest: nothing yet, or memories of an earlier version, which are sealed as they are."""
        names = [path.name for path in self.folder.glob("round-*")]
        if any(SEALED.fullmatch(name) for name in names):
            raise self._trouble(f"{MANIFEST} is missing")
        kept = {}
        for name in names:
            if found := UNSEALED.fullmatch(name):
                try:
                    kept[int(found[1])] = {"file": name, **_seal(_content(self.folder / name))}
                except OSError as error:
                    raise self._trouble(f"{name} cannot be read: {error.strerror or error}") from None
        if kept:
            log.warning("%s: memories of an earlier version have no checksums; they are taken as they are", self.folder)
            self._keep(kept, {})
        return kept

    def _keep(self, kept: Kept, before: Kept) -> None:
        """From now on these are kept; files of those before, and leftovers, go."""
        manifest = {"format": FORMAT, "memories": {str(made): told for made, told in sorted(kept.items())}}
        text = json.dumps({**manifest, "digest": digest_of(manifest)}, indent=1) + "\n"
        write_atomically(self.folder / MANIFEST, text)
        named, known = ({told["file"] for told in some.values() if told} for some in (kept, before))
        leftovers = {path.name for path in self.folder.glob("round-*") if SEALED.fullmatch(path.name)}
        for name in (known | leftovers) - named:
            (self.folder / name).unlink(missing_ok=True)

    def _trouble(self, what: str) -> TrainingError:
        return TrainingError(
            f"what this site remembers in {self.folder} cannot be used: {what} (bring it back from a backup, "
            "or delete the folder: the site then begins anew)"
        )


def _names_a_memory(told: Any) -> bool:
    return told is None or any(pattern.fullmatch(told["file"]) for pattern in (SEALED, UNSEALED))


def _content(path: Path) -> bytes:
    return read_bytes(path, path.stat().st_size)


def _seal(content: bytes) -> dict[str, Any]:
    return {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
