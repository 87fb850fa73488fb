"""Damage to every file of a run: emptied, cut in half, deleted, bytes flipped, digits changed; singly and in pairs."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from torture.child import at_operation, die, run_command
from torture.kills import Reference
from torture.subject import differences
from torture.tally import Tally

__all__ = ["damage"]

Harm = Callable[[bytearray, random.Random], bytearray | None]


@dataclass(frozen=True)
class Damage:
    """What is done to which file of which run."""

    state: Path
    file: Path  # inside the run
    name: str
    harm: Harm
    seed: str

    @property
    def in_newest_checkpoint(self) -> bool:
        return self.file.parent.name == max(path.name for path in (self.state / "checkpoint").glob("round-*"))

    def apply(self, run: Path) -> None:
        path = run / self.file
        spoilt = self.harm(bytearray(path.read_bytes()), random.Random(self.seed))
        path.unlink() if spoilt is None else path.write_bytes(spoilt)


def damage(reference: Reference, seed: int, tally: Tally, share: float = 1.0, pairs: int = 0) -> None:
    """Resume a copy of a finished and of a killed run after each damage, or a seeded share of them, and after pairs."""
    draw = random.Random(f"damage {seed} {reference.method}")
    finished, paused = reference.run, _paused(reference)
    run_command(["evaluate", str(finished), "--protocol", "knn", "--seeds", "1"])
    everything = list(_damages(finished, seed)) + list(_damages(paused, seed))
    for single in everything:
        if draw.random() < share:
            _suffer(reference, [single], _row(single.file), tally)
    for _ in range(pairs):
        one = draw.choice(everything)
        other = draw.choice([d for d in everything if d.state == one.state and d.file != one.file])
        _suffer(reference, [one, other], "two files damaged at once", tally)
    for state in (finished, paused):
        _newest_checkpoint(reference, state, tally)
    _all_checkpoints(reference, finished, tally)


def _damages(state: Path, seed: int) -> Iterator[Damage]:
    files = sorted(path.relative_to(state) for path in state.rglob("*") if path.is_file())
    for file in files:
        size = (state / file).stat().st_size
        harms: dict[str, Harm] = {"deleted": lambda *_: None}
        if size:
            harms |= {"emptied": lambda *_: bytearray(), "halved": lambda data, _: data[: len(data) // 2]}
            harms |= {f"flip {n}": _flip for n in range(3)}
        if file.suffix in (".json", ".jsonl", ".yaml", ".blake2b"):
            harms |= {f"digit {n}": _digit for n in range(4)}
        for name, harm in harms.items():
            yield Damage(state, file, name, harm, f"{seed} {state.name} {file} {name}")


def _flip(data: bytearray, draw: random.Random) -> bytearray:
    data[draw.randrange(len(data))] ^= draw.randint(1, 255)
    return data


def _digit(data: bytearray, draw: random.Random) -> bytearray:
    """Another digit in place of one: what no parser notices."""
    places = [place for place, byte in enumerate(data) if chr(byte).isdigit()]
    if places:
        place = draw.choice(places)
        data[place] = ord(draw.choice([d for d in "0123456789" if d != chr(data[place])]))
    return data


def _suffer(reference: Reference, damages: list[Damage], row: str, tally: Tally) -> None:
    run = reference.subject.folder / "damaged"
    shutil.rmtree(run, ignore_errors=True)
    shutil.copytree(damages[0].state, run)
    for single in damages:
        single.apply(run)
    outcome = run_command(reference.subject.resume(run))
    named = any(single.file.name in outcome.sentence for single in damages)
    spared = all(single.in_newest_checkpoint for single in damages)  # its predecessor is whole, and must be taken
    if outcome.code == 0:
        wrong = differences(run, reference.result)
        fatal = [single.file.name for single in damages if single.in_newest_checkpoint]
        if fatal and not any(name in outcome.said for name in fatal):  # the first that is met is told
            wrong.append("the damage is not told")
        ending = "broken" if wrong else "identical"
    else:
        wrong = [] if named and not spared else [outcome.said[-2000:]]
        ending = "broken" if wrong else "refused"
    row = f"{reference.method}: {row}"
    tally.add(row, ending)
    if wrong:
        done = ", ".join(f"{single.state.name}/{single.file} {single.name}" for single in damages)
        tally.broken(f"{reference.method}: {done}: {'; '.join(wrong)}")


def _newest_checkpoint(reference: Reference, state: Path, tally: Tally) -> None:
    """Whatever is wrong with the newest checkpoint, the one before it is there to go on from."""
    newest = [single for single in _emptied(state) if single.in_newest_checkpoint]
    _suffer(reference, newest, "newest checkpoint damaged", tally)


def _all_checkpoints(reference: Reference, state: Path, tally: Tally) -> None:
    """With no whole checkpoint there is nothing to fall back to: the run must be refused by name and left as it is."""
    _suffer(reference, _emptied(state), "all checkpoints damaged", tally)


def _emptied(state: Path) -> list[Damage]:
    """The global model of every checkpoint."""
    files = [path.relative_to(state) for path in sorted((state / "checkpoint").glob("round-*/server.safetensors"))]
    return [Damage(state, file, "emptied", lambda *_: bytearray(), "") for file in files]


def _paused(reference: Reference) -> Path:
    """A run that was killed while its third checkpoint was being written."""
    run = reference.subject.folder / f"paused-{reference.method}"
    run_command(reference.subject.begin(run, reference.method), at_operation(run, 4, die, inside=".round-000003"))
    if not list((run / "checkpoint").glob(".round-000003*")):
        raise SystemExit("no kill hits the third checkpoint")
    return run


def _row(file: Path) -> str:
    if file.parts[0] == "checkpoint":
        return f"{file.name} of a checkpoint"
    return "TensorBoard's file" if file.parts[0] == "tensorboard" else str(file)
