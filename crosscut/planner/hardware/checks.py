"""Checks of a device file. Each check raises `ConfigError` with the key, the allowed values and the value found."""

import re
from collections.abc import Iterable, Mapping
from itertools import pairwise
from math import inf, isfinite
from typing import Any, NamedTuple

from crosscut.architecture import Operation
from crosscut.config import ConfigError
from crosscut.config.checks import listed, require_one_of

_PRECISIONS = ("float64", "float32", "tf32", "float16", "bfloat16", "float8")


class _Range(NamedTuple):
    """Allowed values of a number."""

    above: float = -inf
    least: float = -inf
    most: float = inf
    whole: bool = False

    def require(self, label: str, value: object) -> None:
        """Raise `ConfigError` unless `value` is a finite number in the range. `label` names the value."""
        if isinstance(value, int if self.whole else int | float) and not isinstance(value, bool) and isfinite(value):
            is_inside = self.above < value and self.least <= value <= self.most
            if is_inside:
                return
        limits = [f"above {self.above}"] * (self.above > -inf) + [f"of at least {self.least}"] * (self.least > -inf)
        limits += [f"at most {self.most}"] * (self.most < inf)
        kind = "whole number" if self.whole else "number"
        raise ConfigError(f"{label} must be a {kind} {' and '.join(limits)}, but is {value!r}.")


_ABOVE_ZERO, _AT_LEAST_ZERO, _SHARE = _Range(above=0), _Range(least=0), _Range(above=0, most=1)
_LINK = {
    "gigabytes_per_second": _ABOVE_ZERO,
    "attained": _SHARE,
    "latency_microseconds": _AT_LEAST_ZERO,
    "reducing": _Range(least=0, most=1),
    "reducing_latency_microseconds": _AT_LEAST_ZERO,
}
_NUMBERS = {
    "memory": {"gigabytes": _ABOVE_ZERO, "gigabytes_per_second": _ABOVE_ZERO, "attained": _SHARE},
    "products": {
        "attained": _SHARE,
        "attention": _ABOVE_ZERO,
        "start_microseconds": _AT_LEAST_ZERO,
        "multiprocessors": _Range(least=0, whole=True),
    },
    "operators": {
        "gelu_gigaelements_per_second": _AT_LEAST_ZERO,
        "forward_microseconds": _AT_LEAST_ZERO,
        "backward_microseconds": _AT_LEAST_ZERO,
        "parameter_microseconds": _AT_LEAST_ZERO,
    },
    "node": {"ranks": _Range(least=1, whole=True), **_LINK},
    "network": _LINK,
    "host": {"gigabytes_per_second": _AT_LEAST_ZERO},
}
"""Numbers in each section of a device file."""
_OTHERS = {"products": ("teraflops", "attained_source", "measured"), "node": ("measured",)}
"""Other keys of the sections, apart from `source`."""
SECTIONS = tuple(_NUMBERS)


def require_values(table: Mapping[str, Any]) -> None:
    """Raise `ConfigError` for a key that a device file does not have, and for a value that is out of range. Missing
    keys are not reported.
    """
    for name in table:
        _require_key("", name, ("name", "device", "device_names", *SECTIONS))
    for section in SECTIONS:
        for name in table.get(section, {}):
            _require_key(section, name, (*_NUMBERS[section], *_OTHERS.get(section, ()), "source"))
    require_one_of("device", table.get("device", "cuda"), ("cuda", "cpu"))
    _require_pattern("device_names", table.get("device_names", ""))
    named = [section for section in SECTIONS if "source" in table.get(section, ())]
    sources = {f"{section}.source": table[section]["source"] for section in named}
    for name, value in {"name": table.get("name", ""), **sources}.items():
        if not isinstance(value, str):
            raise ConfigError(f"`{name}` must be a string, but is {value!r}.")
    for section, numbers in _NUMBERS.items():
        values = table.get(section, {})
        for name, allowed in numbers.items():
            if name in values:
                allowed.require(f"`{section}.{name}`", values[name])
    products, node = table.get("products", {}), table.get("node", {})
    for precision, rate in products.get("teraflops", {}).items():
        _require_key("products.teraflops", precision, _PRECISIONS)
        _ABOVE_ZERO.require(f"`products.teraflops.{precision}`", rate)
    for precision, points in products.get("measured", {}).items():
        _require_key("products.measured", precision, _PRECISIONS)
        _require_rows(f"products.measured.{precision}", points, ("m", "k", "n", "TFLOP/s"))
    for operation, message in node.get("measured", {}).items():
        _require_key("node.measured", operation, tuple(Operation))
        _require_message(f"node.measured.{operation}", message)


def _require_key(section: str, name: str, known: Iterable[str]) -> None:
    """Raise `ConfigError` unless the key `name` of `section` is one of the `known` keys."""
    if name not in (choices := sorted(known)):
        where = f"{section}.{name}" if section else name
        raise ConfigError(f"`{where}` must be a known key of a device file, but is not. Use {listed(choices)}.")


def _require_pattern(name: str, value: str) -> None:
    try:
        re.compile(value)
    except (re.error, TypeError):
        raise ConfigError(f"`{name}` must be a regular expression, but is {value!r}.") from None


def _require_rows(name: str, rows: object, columns: tuple[str, ...]) -> None:
    """Raise `ConfigError` unless `rows` is a non-empty sequence of rows with one positive number for each column."""
    if not isinstance(rows, list | tuple) or not rows:
        raise ConfigError(f"`{name}` must be a list of one or more rows [{', '.join(columns)}], but is {rows!r}.")
    for index, row in enumerate(rows):
        if not isinstance(row, list | tuple) or len(row) != len(columns):
            raise ConfigError(f"`{name}[{index}]` must be a row [{', '.join(columns)}], but is {row!r}.")
        for column, value in zip(columns, row, strict=True):
            _ABOVE_ZERO.require(f"{column} of `{name}[{index}]`", value)


def _require_message(name: str, message: object) -> None:
    if not isinstance(message, dict):
        raise ConfigError(
            f"`{name}` must be a table with `latency_microseconds` and `rates`, but is {message!r}. Write "
            "the file again with `crosscut plan --calibrate FILE`."
        )
    for key in message:
        _require_key(name, key, ("latency_microseconds", "rates"))
    _AT_LEAST_ZERO.require(f"`{name}.latency_microseconds`", message["latency_microseconds"])
    _require_rows(f"{name}.rates", message["rates"], ("MB", "GB/s"))
    sizes = [row[0] for row in message["rates"]]
    if any(larger <= smaller for smaller, larger in pairwise(sizes)):
        raise ConfigError(f"`{name}.rates` must be sorted by MB, without duplicates, but its sizes in MB are {sizes}.")
