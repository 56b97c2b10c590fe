"""Between plain data and frozen settings: unknown keys and values are refused by dotted path."""

from __future__ import annotations

import dataclasses
import difflib
import enum
import math
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import yaml

from cluster import config_text
from cluster.errors import ConfigError

T = TypeVar("T")


def plain(value: Any) -> Any:
    """Return settings as plain data that any serializer takes."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, tuple):
        return [plain(item) for item in value]
    return dict(value) if isinstance(value, Mapping) else value


def override(tree: dict[str, Any], setting: str) -> None:
    """Apply one ``a.b=value``, a YAML value; raises ConfigError where it names no such place."""
    dotted, separator, text = setting.partition("=")
    if not separator or not dotted:
        raise ConfigError(f"--set {setting}: expected a.b=value", field=dotted or None)
    *parents, last = dotted.split(".")
    node: Any = tree
    for name in parents:
        node = _child(node, name, dotted)
    if not isinstance(node, dict):
        raise ConfigError(f"--set {setting}: {dotted} is not inside a section", field=dotted)
    try:
        node[last] = config_text.parse(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"--set {setting}: not a YAML value", field=dotted) from error
    except ConfigError as error:
        raise ConfigError(f"--set {setting}: {error.message}", field=dotted) from error


def _child(node: Any, name: str, dotted: str) -> Any:
    if isinstance(node, dict):
        return node.setdefault(name, {})
    if isinstance(node, list):
        named = {
            str(item["name"]): item for item in node if isinstance(item, dict) and "name" in item
        }
        if name in named:
            return named[name]
        if name.isdigit() and int(name) < len(node):
            return node[int(name)]
        raise refused(dotted, name, list(named), what="element")
    raise ConfigError(f"{dotted}: {name} is not inside a section", field=dotted)


def refused(path: str, got: object, valid: Sequence[str], *, what: str) -> ConfigError:
    """Return the error for a name that is not there, with the nearest one that is."""
    near = difflib.get_close_matches(str(got), valid, n=1, cutoff=0.5)
    hint = f"; did you mean {near[0]!r}?" if near else f"; valid: {', '.join(valid)}"
    return ConfigError(f"{path}: unknown {what} {got!r}{hint}", field=path)


def build(kind: type[T], tree: Any, path: str = "") -> T:
    """Make a ``kind`` of plain data; raises ConfigError with the dotted path of what is wrong."""
    if not isinstance(tree, Mapping):
        raise ConfigError(f"{path or 'file'}: expected a section, got {tree!r}", field=path)
    hints = typing.get_type_hints(kind)
    prefix = f"{path}." if path else ""
    for key in tree:
        if key not in hints:
            raise refused(f"{prefix}{key}", key, list(hints), what="key")
    values = {key: _value(hints[key], value, f"{prefix}{key}") for key, value in tree.items()}
    for f in dataclasses.fields(kind):  # type: ignore[arg-type]
        required = f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
        if required and f.name not in values:
            raise ConfigError(f"{prefix}{f.name}: missing", field=f"{prefix}{f.name}")
    return kind(**values)


def _value(hint: Any, value: Any, path: str) -> Any:
    if typing.get_origin(hint) is tuple:
        if not isinstance(value, list):
            raise ConfigError(f"{path}: expected a list, got {value!r}", field=path)
        item_hint = typing.get_args(hint)[0]
        return tuple(_value(item_hint, item, f"{path}.{i}") for i, item in enumerate(value))
    if typing.get_origin(hint) is Mapping:
        if not isinstance(value, Mapping):
            raise ConfigError(f"{path}: expected names and values, got {value!r}", field=path)
        kind = typing.get_args(hint)[1]
        return {_scalar(str, k, path): _value(kind, v, f"{path}.{k}") for k, v in value.items()}
    if typing.get_origin(hint) is types.UnionType:
        # The only kind there is: something, or None where the file says nothing.
        (inner,) = (kind for kind in typing.get_args(hint) if kind is not types.NoneType)
        return None if value is None else _value(inner, value, path)
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return build(hint, value, path)
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        valid = [member.value for member in hint]
        if value not in valid:
            raise refused(path, value, valid, what=hint.__name__.lower())
        return hint(value)
    return _scalar(hint, value, path)


def _scalar(hint: type, value: Any, path: str) -> Any:
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        value = _as_float(value)
    if not isinstance(value, hint) or (isinstance(value, bool) and hint is not bool):
        raise ConfigError(f"{path}: expected {hint.__name__}, got {value!r}", field=path)
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{path}: expected a finite number, got {value!r}", field=path)
    return value


def _as_float(value: int) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.inf
