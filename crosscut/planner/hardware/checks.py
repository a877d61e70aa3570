"""Checks of a device file. Each check raises `ConfigError` with the key, the allowed values and the value found."""

import re
from collections.abc import Iterable, Mapping
from itertools import pairwise
from math import inf, isfinite
from typing import Any

from crosscut.architecture import Operation
from crosscut.config import ConfigError
from crosscut.config.checks import listed, require_one_of

_PRECISIONS = ("float64", "float32", "tf32", "float16", "bfloat16", "float8")

_ABOVE_ZERO = {"memory": ("gigabytes", "gigabytes_per_second"), "products": ("attention",)} | dict.fromkeys(
    ("node", "network"), ("gigabytes_per_second",)
)
_AT_LEAST_ZERO = {
    "products": ("start_microseconds",),
    "operators": (
        "gelu_gigaelements_per_second",
        "forward_microseconds",
        "backward_microseconds",
        "parameter_microseconds",
    ),
    "node": ("latency_microseconds",),
    "network": ("latency_microseconds",),
    "host": ("gigabytes_per_second",),
}
_SECTIONS = ("memory", "products", "operators", "node", "network", "host")
_WITH_ATTAINED = ("memory", "products", "node", "network")


def require_values(table: Mapping[str, Any]) -> None:
    """Raise `ConfigError` if a value of a device file is out of range. Missing keys are not reported."""
    require_one_of("device", table.get("device", "cuda"), ("cuda", "cpu"))
    _require_pattern("device_names", table.get("device_names", ""))
    for name, value in [("name", table.get("name", "")), *_there(table, dict.fromkeys(_SECTIONS, ("source",)))]:
        if not isinstance(value, str):
            raise ConfigError(f"`{name}` must be a string, but is {value!r}.")
    for name, value in _there(table, _ABOVE_ZERO):
        _require_number(f"`{name}`", value, above=0)
    for name, value in _there(table, _AT_LEAST_ZERO):
        _require_number(f"`{name}`", value, least=0)
    for name, value in _there(table, dict.fromkeys(_WITH_ATTAINED, ("attained",))):
        _require_number(f"`{name}`", value, above=0, most=1)
    for name, value in _there(table, {"products": ("multiprocessors",)}):
        _require_number(f"`{name}`", value, least=0, whole=True)
    for name, value in _there(table, {"node": ("ranks",)}):
        _require_number(f"`{name}`", value, least=1, whole=True)
    products, node = table.get("products", {}), table.get("node", {})
    for precision, rate in products.get("teraflops", {}).items():
        require_key("products.teraflops", precision, _PRECISIONS)
        _require_number(f"`products.teraflops.{precision}`", rate, above=0)
    for precision, points in products.get("measured", {}).items():
        require_key("products.measured", precision, _PRECISIONS)
        _require_rows(f"products.measured.{precision}", points, ("m", "k", "n", "TFLOP/s"))
    for operation, message in node.get("measured", {}).items():
        require_key("node.measured", operation, tuple(Operation))
        _require_message(f"node.measured.{operation}", message)


def require_key(section: str, name: str, known: Iterable[str]) -> None:
    """Raise `ConfigError` unless the key `name` of `section` is one of the `known` keys."""
    if name not in (choices := sorted(known)):
        where = f"{section}.{name}" if section else name
        raise ConfigError(f"`{where}` must be a known key of a device file, but is not. Use {listed(choices)}.")


def _there(table: Mapping[str, Any], keys: Mapping[str, Iterable[str]]) -> list[tuple[str, Any]]:
    sections = [(section, table.get(section, {}), names) for section, names in keys.items()]
    return [(f"{section}.{key}", has[key]) for section, has, names in sections for key in names if key in has]


def _require_number(
    label: str,
    value: object,
    *,
    above: float = -inf,
    least: float = -inf,
    most: float = inf,
    whole: bool = False,
) -> None:
    """Raise `ConfigError` unless `value` is a finite number in the range. `label` names the value."""
    is_number = isinstance(value, int if whole else int | float) and not isinstance(value, bool)
    if is_number and isfinite(value) and above < value and least <= value <= most:  # type: ignore[arg-type, operator]
        return
    limits = [f"above {above}"] * (above > -inf) + [f"of at least {least}"] * (least > -inf)
    limits += [f"at most {most}"] * (most < inf)
    kind = "whole number" if whole else "number"
    raise ConfigError(f"{label} must be a {kind} {' and '.join(limits)}, but is {value!r}.")


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
            _require_number(f"{column} of `{name}[{index}]`", value, above=0)


def _require_message(name: str, message: object) -> None:
    if not isinstance(message, dict):
        raise ConfigError(
            f"`{name}` must be a table with `latency_microseconds` and `rates`, but is {message!r}. Write "
            "the file again with `crosscut plan --calibrate FILE`."
        )
    for key in message:
        require_key(name, key, ("latency_microseconds", "rates"))
    _require_number(f"`{name}.latency_microseconds`", message["latency_microseconds"], least=0)
    _require_rows(f"{name}.rates", message["rates"], ("MB", "GB/s"))
    sizes = [row[0] for row in message["rates"]]
    if any(larger <= smaller for smaller, larger in pairwise(sizes)):
        raise ConfigError(f"`{name}.rates` must be sorted by MB, without duplicates, but its sizes in MB are {sizes}.")
