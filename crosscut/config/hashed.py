"""Hashes of settings that are keys of many caches."""

from dataclasses import fields
from functools import cached_property
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


class HashedOnce:
    """Base of frozen dataclasses whose objects compute their hash only once.

    The hash of a dataclass is computed from all its fields at every look-up in a cache. `dataclass` writes a `__hash__`
    unless the class has its own, so a subclass contains the line `__hash__ = HashedOnce.__hash__`.
    """

    @cached_property
    def _hash(self) -> int:
        return hash(tuple(getattr(self, field.name) for field in fields(cast("DataclassInstance", self))))

    def __hash__(self) -> int:
        """Hash of all fields."""
        return self._hash

    def __getstate__(self) -> dict[str, object]:
        """Return the state without the hash, because the hashes of strings differ between processes."""
        return {name: value for name, value in vars(self).items() if name != "_hash"}
