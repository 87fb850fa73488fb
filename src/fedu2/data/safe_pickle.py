"""The few pickles that CIFAR's "python version" consists of, read without trusting them.

A pickle is a program. This reader admits only the instructions that build dictionaries, lists, numbers, strings and
one kind of array, and calls nothing of NumPy's: stand-ins record what the file says about an array, and the array
is then made from these words after they have been checked.
"""

from __future__ import annotations

import io
import pickle  # nosec B403
import pickletools  # nosec B403
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["UnsafePickleError", "load_plain"]

# Memo writes (BINPUT, LONG_BINPUT) are admitted with small indices only: a single huge one allocates gigabytes. So are
# numbers (LONG1) of 32 bits: of larger ones a dictionary can be made that takes hours to fill.
_ADMITTED = """
    PROTO STOP MARK NONE NEWTRUE NEWFALSE BININT BININT1 BININT2 LONG1
    BINSTRING SHORT_BINSTRING BINBYTES SHORT_BINBYTES BINUNICODE
    EMPTY_DICT SETITEM SETITEMS EMPTY_LIST APPEND APPENDS EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3
    BINPUT LONG_BINPUT BINGET LONG_BINGET GLOBAL REDUCE BUILD
"""

MOST = 1_000_000  # instructions: CIFAR-100 has a few hundred thousand, and each may take sixty times its own byte


class UnsafePickleError(ValueError):
    """The file is damaged, or asks for more than plain data."""


def load_plain(blob: bytes) -> Any:
    """What `blob` describes: dict, list, int, str (Python 2's strings, decoded as Latin-1) and uint8 arrays."""
    try:
        _check_instructions(blob)
        return _plain(_PlainUnpickler(blob).load(), {})
    except UnsafePickleError:
        raise
    except Exception as error:  # a damaged pickle can fail in any way at all
        raise UnsafePickleError(f"damaged pickle ({error or type(error).__name__})") from error


def _check_instructions(blob: bytes) -> None:
    admitted = frozenset(_ADMITTED.split())
    for number, (instruction, argument, _) in enumerate(pickletools.genops(blob)):
        if instruction.name not in admitted:
            raise UnsafePickleError(
                f"the pickle contains the instruction {instruction.name}, which no CIFAR file needs"
            )
        too_large = {"LONG_BINPUT": len(blob), "LONG1": 1 << 32}.get(instruction.name)
        if number >= MOST or (too_large is not None and abs(argument or 0) > too_large):
            raise UnsafePickleError("the pickle asks for more memory than it can need")


class _DType:
    """What a pickle says about an element type."""

    def __init__(self, name: str | bytes, *_: object) -> None:
        self.name = name if isinstance(name, str) else name.decode("latin1")

    def __setstate__(self, state: object) -> None:
        """Byte order and alignment: of no account for single bytes."""


class _Array:
    """What a pickle says about an array."""

    state: tuple[Any, ...] = ()

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.state = state

    def to_numpy(self) -> NDArray[np.uint8]:
        """The array, provided that it is a plain one of bytes."""
        _, shape, dtype, fortran_order, data = self.state
        if not isinstance(dtype, _DType) or dtype.name not in ("u1", "|u1") or fortran_order:
            raise UnsafePickleError("the pickle holds an array that is not of bytes in C order")
        raw = data if isinstance(data, bytes) else data.encode("latin1")
        return np.frombuffer(raw, np.uint8).reshape(shape)


class _PlainUnpickler(pickle.Unpickler):
    """Knows the four names that occur in pickled byte arrays, each as a harmless stand-in."""

    def __init__(self, blob: bytes) -> None:
        super().__init__(io.BytesIO(blob), encoding="latin1")
        self.left = len(blob)  # bytes that may still be encoded: every text is there once

    def find_class(self, module: str, name: str) -> Any:
        stand_ins = {
            ("numpy.core.multiarray", "_reconstruct"): self._reconstruct,
            ("numpy._core.multiarray", "_reconstruct"): self._reconstruct,
            ("numpy", "ndarray"): _Array,
            ("numpy", "dtype"): _DType,
            ("_codecs", "encode"): self._encode,
        }
        if (module, name) not in stand_ins:
            raise UnsafePickleError(f"the pickle asks for {module}.{name}, which no CIFAR file needs")
        return stand_ins[module, name]

    def _reconstruct(self, *_: object) -> _Array:
        return _Array()

    def _encode(self, text: str, encoding: str) -> bytes:
        if encoding != "latin1":  # the only codec by which Python 3 writes bytes into old pickles
            raise UnsafePickleError(f"the pickle asks for the codec {encoding!r}, which no CIFAR file needs")
        self.left -= len(text)
        if self.left < 0:
            raise UnsafePickleError("the pickle asks for more memory than it can need")
        return text.encode("latin1")


def _plain(value: Any, made: dict[int, Any], depth: int = 0) -> Any:
    """`value` with its stand-ins replaced by arrays; `made` has what was replaced, for it may occur many times."""
    if depth > 4:
        raise UnsafePickleError("the pickle is nested more deeply than any CIFAR file")
    if value is None or isinstance(value, bool | int | str | bytes):
        return value
    if id(value) not in made:
        made[id(value)] = _replaced(value, made, depth)
    return made[id(value)]


def _replaced(value: Any, made: dict[int, Any], depth: int) -> Any:
    if isinstance(value, _Array):
        return value.to_numpy()
    if isinstance(value, dict):
        return {_plain(key, made, depth + 1): _plain(item, made, depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, made, depth + 1) for item in value]
    raise UnsafePickleError(f"the pickle holds a {type(value).__name__}, which no CIFAR file needs")
