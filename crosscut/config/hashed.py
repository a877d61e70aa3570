"""Hashes of settings that are keys of many caches."""

from typing import TypeVar

_Settings = TypeVar("_Settings")


def hashed_once(settings: type[_Settings]) -> type[_Settings]:
    """Let the objects of a frozen dataclass compute their hash only once, and return the class.

    The hash of a dataclass is computed from all its fields at every look-up in a cache. Pickles leave the stored hash
    out, because the hashes of strings differ between processes.
    """
    of_fields = settings.__hash__

    def hash_once(self: _Settings) -> int:
        values = vars(self)
        if "_hash" not in values:
            values["_hash"] = of_fields(self)
        stored: int = values["_hash"]
        return stored

    def state_without_hash(self: _Settings) -> dict[str, object]:
        return {name: value for name, value in vars(self).items() if name != "_hash"}

    settings.__hash__ = hash_once  # type: ignore[method-assign, assignment]
    settings.__getstate__ = state_without_hash  # type: ignore[method-assign, assignment]
    return settings
