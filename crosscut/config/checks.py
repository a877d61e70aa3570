"""Checks that the config dataclasses share. Each check raises `ConfigError` in the grammar of `errors`."""

from collections.abc import Iterable
from math import isqrt

from crosscut.config.errors import ConfigError


def divisors(number: int) -> list[int]:
    """All positive divisors of a positive number, in ascending order."""
    low = [d for d in range(1, isqrt(number) + 1) if number % d == 0]
    return low + [number // d for d in reversed(low) if d * d != number]


def listed(items: Iterable[object]) -> str:
    """Join items as in a sentence: `1, 2 or 4`."""
    words = [str(item) for item in items]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"


def require_at_least(name: str, value: float, minimum: float) -> None:
    """Raise unless `value >= minimum`."""
    if not value >= minimum:
        raise ConfigError(f"`{name}` must be at least {minimum}, but is {value}.")


def require_fraction(name: str, value: float) -> None:
    """Raise unless `0 <= value < 1`."""
    if not 0 <= value < 1:
        raise ConfigError(f"`{name}` must be at least 0 and below 1, but is {value}.")


def require_one_of(name: str, value: str, allowed: Iterable[str]) -> None:
    """Raise unless `value` is one of `allowed`."""
    if value not in (choices := list(allowed)):
        raise ConfigError(f"`{name}` must be {listed(repr(c) for c in choices)}, but is {value!r}.")
