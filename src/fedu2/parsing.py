"""From text to a validated model, and from pydantic's findings to one sentence in the user's words."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from fedu2.errors import UsageError, did_you_mean
from fedu2.files import read_text

__all__ = ["choices", "explain", "fields", "keys", "laid_over", "leaves", "read_yaml", "tree"]

LONGEST = 1 << 16  # bytes of a configuration; a complete one has five thousand
MOST = 10_000  # keys and values in it


def tree(model: type[BaseModel], values: Mapping[str, Any], assignments: Sequence[str] = ()) -> dict[str, Any]:
    """Nested or dotted `values`, nested, with `key=value` assignments laid over them.

    A value is read as YAML, but for the keys of `model` that hold text, such as paths: there it is taken as it stands.
    """
    texts = {key for key, field in fields(model) if str in (field.annotation, *get_args(field.annotation))}
    if not isinstance(values, Mapping):
        raise UsageError("a configuration holds keys and values")
    try:
        nested = _nested(values)
    except RecursionError:
        raise UsageError("the configuration refers to itself") from None
    for assignment in assignments:
        key, equals, text = assignment.partition("=")
        if not equals:
            raise UsageError(f"{assignment!r} is not of the form key=value")
        key = key.strip()
        literal = key in texts and text not in ("", "null")
        _assign(nested, key, text if literal else _scalar(key, text))
    for key, value in leaves(nested):
        if isinstance(value, int) and abs(value) >= 1 << 63:  # some cannot even be printed
            raise UsageError(f"{key} is too large a number")
    return nested


def read_yaml(path: Path) -> dict[str, Any]:
    """The keys and values in a YAML file."""
    try:
        values = _load(read_text(path, LONGEST))
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read the configuration {str(path)!r}: {error}") from None
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        problem = " ".join(str(error).split())
        raise UsageError(f"the configuration {str(path)!r} is not valid YAML: {problem}") from None
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise UsageError(f"the configuration {str(path)!r} must hold keys and values")
    return values


def _load(text: str) -> Any:
    """What YAML says, unless its aliases make much of little."""
    node = yaml.compose(text, yaml.SafeLoader)
    if _size(node, {}) > MOST:
        raise ValueError(f"it says more than {MOST:,} things")
    try:
        return yaml.safe_load(text)
    except (AttributeError, LookupError, TypeError, OverflowError):  # !!timestamp x, !!bool x, !!int ''
        raise ValueError("a value is not of the kind that its tag says") from None


def _size(node: yaml.Node | None, known: dict[int, int]) -> int:
    """The number of nodes after every alias has been written out."""
    if id(node) not in known:
        known[id(node)] = MOST + 1  # if it is met again meanwhile, it lies in itself
        pairs = node.value if isinstance(node, yaml.MappingNode) else []
        inner = node.value if isinstance(node, yaml.SequenceNode) else [part for pair in pairs for part in pair]
        known[id(node)] = 1 + sum(_size(part, known) for part in inner)
    return known[id(node)]


def laid_over(defaults: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """`values`, with `defaults` where they say nothing; groups of keys are merged."""
    merged = dict(defaults)
    for key, value in values.items():
        group = defaults.get(key)
        both = isinstance(group, Mapping) and isinstance(value, Mapping)
        merged[key] = {**group, **value} if both else value  # type: ignore[dict-item]
    return merged


def leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys and values of a nested mapping."""
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def fields(options: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """All keys that can be set, dotted, with their descriptions."""
    for name, field in options.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from fields(field.annotation, f"{prefix}{name}.")
        else:
            yield prefix + name, field


def keys(options: type[BaseModel]) -> list[str]:
    """All keys that can be set, dotted."""
    return [key for key, _ in fields(options)]


def _nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """A deep copy in which dotted keys have become nested ones."""
    tree: dict[str, Any] = {}
    for key, value in values.items():
        _assign(tree, str(key), _nested(value) if isinstance(value, Mapping) else value)
    return tree


def _assign(tree: dict[str, Any], key: str, value: Any) -> None:
    """Set a dotted key; a mapping is laid over what is there instead of replacing it."""
    *groups, name = key.split(".")
    for group in groups:
        tree = tree.setdefault(group, {})
        if not isinstance(tree, dict):
            raise UsageError(f"{key!r} cannot be set: {group!r} is a value, not a group of keys")
    if isinstance(value, dict) and isinstance(tree.get(name), dict):
        for inner, inner_value in value.items():
            _assign(tree[name], str(inner), inner_value)
    else:
        tree[name] = value


def _scalar(key: str, text: str) -> Any:
    try:
        value = _load(text) if text.strip() else None
    except (yaml.YAMLError, ValueError, RecursionError, OverflowError):
        raise UsageError(f"the value of {key}={text!r} cannot be read") from None
    if isinstance(value, str):  # YAML 1.1 reads 1e-3 as a string; people mean the number
        try:
            return float(value)
        except ValueError:
            return value
    return value


def explain(model: type[BaseModel], error: ValidationError) -> str:
    """The first problem that pydantic found, as one sentence in our words."""
    problems = error.errors()
    problem = next((p for p in problems if p["type"] == "extra_forbidden"), problems[0])
    path = [str(part) for part in problem["loc"]]
    if problem["type"] == "extra_forbidden":
        key = ".".join(path)
        return f"unknown key {key!r}{did_you_mean(key, keys(model)) or '; `fedu2 train --keys` lists all keys'}"
    key = ".".join(path[: _depth(model, path)])
    inside = [known for known in keys(model) if known.startswith(f"{key}.")]
    if inside:
        return f"{key} is a group of keys: set {', '.join(inside[:3])}{', ...' if len(inside) > 3 else ''}"
    allowed = choices(model, key)
    if allowed:
        near = did_you_mean(_shown(problem["input"]), allowed)
        return f"{key}={_shown(problem['input'])} is not allowed: choose from {', '.join(allowed)}{near}"
    message = problem["msg"][0].lower() + problem["msg"][1:]
    return f"{key}={_shown(problem['input'])} is not allowed: {message}"


def _shown(value: Any) -> str:
    """What was given, in a line that is not too long."""
    try:
        text = value if isinstance(value, str) else yaml.safe_dump(value).splitlines()[0]
    except (ValueError, yaml.YAMLError, RecursionError):  # thousands of digits; what YAML has no words for
        text = f"a {type(value).__name__}"
    return text if len(text) <= 200 else f"{text[:200]}…"


def _depth(model: type[BaseModel], path: Sequence[str]) -> int:
    """How many leading parts of an error's location are keys (the rest names the branch of a union)."""
    known = set(keys(model))
    return next((n for n in range(len(path), 0, -1) if ".".join(path[:n]) in known), len(path))


def choices(model: type[BaseModel], key: str) -> list[str]:
    """The words that a key allows, if it allows only (or also) words."""
    options = model
    *groups, name = key.split(".")
    for group in groups:
        annotation = options.model_fields[group].annotation if group in options.model_fields else None
        if not isinstance(annotation, type) or not issubclass(annotation, BaseModel):
            return []
        options = annotation
    if name not in options.model_fields:
        return []
    annotation = options.model_fields[name].annotation
    literals = [annotation, *get_args(annotation)]
    words = [word for literal in literals for word in get_args(literal) if isinstance(word, str)]
    bare = [(get_origin(arg) is Annotated and get_args(arg)[0]) or arg for arg in get_args(annotation)]
    extra = [arg.__name__ for arg in bare if arg in (int, float)]
    return words + ([f"a number ({extra[0]})"] if words and extra else [])
