"""Dataclasses as JSON, and back with every value checked.

The files of a run and the messages between processes are dataclasses. `to_json` writes one as an object, and
`from_json` reads it back and checks each value against the type of its field, because a file may come from anybody. A
tuple is a list in JSON, a path and a member of an enumeration are strings. Keys that the dataclass does not have are
ignored, and a missing key has the default of its field.
"""

import dataclasses
import reprlib
import types
import typing
from collections.abc import Mapping, Sequence
from enum import Enum
from functools import lru_cache
from math import isfinite
from pathlib import Path
from typing import Annotated, Any, TypeAlias, TypeVar

_T = TypeVar("_T")

Kind: TypeAlias = Any
"""Type of a field, such as `int`, `tuple[int, ...]` or a dataclass. Python has no type for all of them."""

LARGEST = (1 << 63) - 1
"""Largest integer that a field may have. It is also the largest that torch and numpy can hold."""

Count = Annotated[int, "count"]
"""Integer from 0 to 2^63 - 1."""

_SPELLED: Mapping[object, str] = types.MappingProxyType(
    {int: "an integer", float: "a number", bool: "true or false", str: "a string", type(None): "null"}
)


def to_json(value: object) -> Any:
    """Convert a dataclass, and everything in it, to values that `json.dumps` accepts."""
    if dataclasses.is_dataclass(value):
        return {field.name: to_json(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {key: to_json(one) for key, one in value.items()}
    if isinstance(value, frozenset):
        return sorted(map(to_json, value))
    if isinstance(value, tuple | list):
        return [to_json(one) for one in value]
    if isinstance(value, Enum):
        return value.value
    return str(value) if isinstance(value, Path) else value


def from_json(kind: type[_T], value: object, name: str = "the content") -> _T:
    """Make a `kind` from a parsed JSON value: a dataclass, a named tuple, or any type that a field may have.

    Raises `ValueError` if a value does not have the type of its field, if an integer does not fit into 64 bits, if a
    number is not finite, or if a required key is missing. The message names the field; `name` stands for the whole.
    """
    return typing.cast(_T, _read(kind, value, name))


def _read(kind: Any, value: object, name: str) -> object:
    if kind is Any:
        return value
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is Annotated:
        return _count(value, name) if kind == Count else _read(arguments[0], value, name)
    if origin in (typing.Union, types.UnionType):  # a value that may also be null
        (kind,) = (one for one in arguments if one is not types.NoneType)
        return None if value is None else _read(kind, value, name)
    if origin in (tuple, list, frozenset, Sequence):
        return _items(origin, arguments, value, name)
    if origin in (dict, Mapping):
        table = _table(value, name)
        return {_read(arguments[0], key, name): _read(arguments[1], one, f"{name}.{key}") for key, one in table.items()}
    if origin is typing.Literal:
        return _one_of(arguments, value, name)
    if dataclasses.is_dataclass(kind) or hasattr(kind, "_fields"):
        return _object(kind, value, name)
    return _scalar(kind, value, name)


def _items(origin: Kind, arguments: tuple[Kind, ...], items: object, name: str) -> object:
    """Read a list. A tuple has one type for all items (`tuple[int, ...]`), or one for each."""
    if not isinstance(items, list | tuple):
        raise ValueError(f"`{name}` must be a list, but is {reprlib.repr(items)}")
    make = tuple if origin is Sequence else origin
    if arguments[0] is str and set(map(type, items)) == {str}:  # the usual list of texts, at once
        return make(items)
    if origin is not tuple or arguments[1:] == (...,):
        kinds = [arguments[0]] * len(items)
    elif len(items) == len(arguments):
        kinds = list(arguments)
    else:
        raise ValueError(f"`{name}` must be a list of {len(arguments)} values, but is {reprlib.repr(items)}")
    return make(
        _read(kind, item, f"{name}[{index}]") for index, (kind, item) in enumerate(zip(kinds, items, strict=True))
    )


def _object(kind: Kind, value: object, name: str) -> object:
    """Read a dataclass from an object. A named tuple may also be a list, as `json.dumps` writes it."""
    hints, required = fields_of(kind)
    if isinstance(value, list | tuple) and hasattr(kind, "_fields") and len(value) == len(hints):
        value = dict(zip(hints, value, strict=True))
    table = _table(value, name)
    for key in required:
        if key not in table:
            raise ValueError(f"`{key}` is missing")
    return kind(**{key: _read(hint, table[key], key) for key, hint in hints.items() if key in table})


@lru_cache(maxsize=256)
def fields_of(kind: Kind) -> tuple[Mapping[str, Kind], tuple[str, ...]]:
    """Return the types of the fields of a dataclass or a named tuple by name, and the names of those without a
    default.
    """
    hints = typing.get_type_hints(kind, include_extras=True)
    if not dataclasses.is_dataclass(kind):
        return hints, tuple(name for name in hints if name not in kind._field_defaults)
    fields = [field for field in dataclasses.fields(kind) if field.init]
    missing = dataclasses.MISSING
    required = (field.name for field in fields if field.default is missing and field.default_factory is missing)
    return {field.name: hints[field.name] for field in fields}, tuple(required)


def _scalar(kind: Kind, value: object, name: str) -> object:
    if issubclass(kind, Enum):
        return kind(_one_of([one.value for one in kind], value, name))
    if issubclass(kind, Path):
        return kind(_read(str, value, name))
    if kind is float and type(value) is int and abs(value) <= LARGEST:
        return float(value)
    if type(value) is not kind:
        raise ValueError(f"`{name}` must be {_SPELLED[kind]}, but is {reprlib.repr(value)}")
    if isinstance(value, int) and not -LARGEST - 1 <= value <= LARGEST:
        raise ValueError(f"`{name}` must be from -2^63 to 2^63 - 1, but is {reprlib.repr(value)}")
    if isinstance(value, float) and not isfinite(value):
        raise ValueError(f"`{name}` must be finite, but is {value}")
    return value


def _one_of(allowed: Sequence[object], value: object, name: str) -> object:
    if value not in allowed:
        raise ValueError(f"`{name}` must be one of {', '.join(map(str, allowed))}, but is {reprlib.repr(value)}")
    return value


def _count(value: object, name: str) -> int:
    if type(value) is int and not 0 <= value <= LARGEST:
        raise ValueError(f"`{name}` must be from 0 to 2^63 - 1, but is {reprlib.repr(value)}")
    return typing.cast(int, _scalar(int, value, name))


def _table(value: object, name: str) -> Mapping[str, object]:
    if not isinstance(value, Mapping):
        raise ValueError(f"`{name}` must be an object, but is {reprlib.repr(value)}")
    return value
