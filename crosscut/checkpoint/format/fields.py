"""Read fields from the JSON files of a checkpoint, and check their types.

The hashes in a checkpoint do not show who wrote the checkpoint, so the JSON may hold anything. For an invalid field,
every function raises `ValueError` with the field's name.
"""

import reprlib
from collections.abc import Mapping
from typing import Any, TypeAlias, TypeVar

from crosscut.config.system.files import parse_json
from crosscut.config.system.records import LARGEST

_T = TypeVar("_T")

JsonValue: TypeAlias = Any
"""A value that JSON can express."""

_KINDS = {dict: "an object", list: "a list", str: "a string", int: "an integer", bool: "true or false"}


def parse_table(content: bytes) -> dict[str, JsonValue]:
    """Parse a JSON object."""
    return checked(parse_json(content), dict, "the content")


def checked(value: object, kind: type[_T], name: str) -> _T:
    """Check that `value` has exactly the type `kind`, and return `value`."""
    if type(value) is not kind:
        raise ValueError(f"`{name}` must be {_KINDS[kind]}, but is {reprlib.repr(value)}")
    return value


def field_of(table: Mapping[str, JsonValue], name: str, kind: type[_T]) -> _T:
    """Return a field of exactly the type `kind`."""
    if name not in table:
        raise ValueError(f"`{name}` is missing")
    return checked(table[name], kind, name)


def count_of(table: Mapping[str, JsonValue], name: str) -> int:
    """Return a field that holds an integer from 0 to 2^63 - 1."""
    return _count(field_of(table, name, int), name)


def counts_of(table: Mapping[str, JsonValue], name: str) -> tuple[int, ...]:
    """Return a field that holds a list of integers from 0 to 2^63 - 1."""
    return tuple(_count(value, name) for value in field_of(table, name, list))


def checked_file(name: str) -> str:
    """Check that `name` is the name of a file directly in the checkpoint's folder, and return `name`."""
    if name in {"", ".", ".."} or any(character in name for character in "/\\\0"):
        raise ValueError(f"every file must be directly in the checkpoint's folder, but {reprlib.repr(name)} is not")
    return name


def _count(value: object, name: str) -> int:
    number = checked(value, int, name)
    if not 0 <= number <= LARGEST:
        raise ValueError(f"`{name}` must be from 0 to 2^63 - 1, but is {reprlib.repr(number)}")
    return number
