"""Plan of a cut as a TOML file, which a person can edit.

tensor = [2, 4]

[rules."model.layers.*.self_attn.q_proj"]
style = "colwise"
units = 8
reason = "goes to o_proj by heads"

[integers."model.layers.*.self_attn"]
num_heads = [4, 2]

[tables."model.layers.*.self_attn.slopes"]
dimension = 0
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

from crosscut.config import ConfigError, write_whole
from crosscut.config.checks import shown
from crosscut.config.loading.keys import advice, nearest
from crosscut.config.loading.toml_lines import key_lines
from crosscut.config.system.files import parse_toml, read_small
from crosscut.cutting.plan import Plan, Rule, Style, Table

_T = TypeVar("_T")

_KINDS: dict[str, tuple[Callable[[object], bool], str]] = {
    "style": (lambda value: isinstance(value, str), "the name of a style"),
    "reason": (lambda value: isinstance(value, str), "text"),
    "parts": (lambda value: _is_list_of(int, value), "a list of whole numbers"),
    "columns": (lambda value: _is_list_of(str, value), "a list of names"),
    "units": (lambda value: type(value) is int, "a whole number"),
    "dimension": (lambda value: type(value) is int, "a whole number"),
}
"""Check and description of each key of a rule and of a table."""


def write_plan(plan: Plan, path: Path) -> None:
    """Write a plan to a TOML file, atomically. Values that are defaults are left out."""
    import tomli_w  # imported here, as in `config.loading`

    table: dict[str, object] = {"grid": list(plan.grid)} if plan.grid else {"tensor": list(plan.tensor)}
    table["rules"] = {name: _set_values(rule) for name, rule in plan.rules.items()}
    table["integers"] = {
        name: {key: list(values) for key, values in attributes.items()} for name, attributes in plan.integers.items()
    }
    table["tables"] = {name: _set_values(each) for name, each in plan.tables.items()}
    write_whole(path, tomli_w.dumps({key: value for key, value in table.items() if value}))


def _set_values(record: Rule | Table) -> dict[str, object]:
    """Return the values of a record that differ from their defaults, as plain values."""
    found = {each.name: getattr(record, each.name) for each in fields(record)}
    plain = {name: str(value) if isinstance(value, Style) else value for name, value in found.items()}
    return {each.name: plain[each.name] for each in fields(record) if plain[each.name] != each.default}


def read_plan(path: Path | str) -> Plan:
    """Read a plan from a TOML file. Raises `ConfigError` if the file cannot be read, or if a value is impossible. The
    message starts with the file and the line of the value.
    """
    path = Path(path)
    try:
        text = read_small(path)
        table = parse_toml(text)
    except OSError as error:
        raise ConfigError(f"`{path}` must be a readable TOML file, but is not: {error.strerror}.") from None
    except ValueError as error:
        raise ConfigError(f"`{path}` must be valid TOML, but is not: {error}.") from None
    try:
        return _plan_of(table)
    except ConfigError as error:
        raise type(error)(_with_line(str(error), path, text)) from None


def _with_line(message: str, path: Path, text: str) -> str:
    """Put the file, and the line of the key that a message begins with, in front of the message. A key that is missing
    has the line of its section.
    """
    lines, name = key_lines(text), re.match(r"`([^`]*)`", message)
    key = name[1] if name else ""
    while key and key not in lines:
        key = key.rpartition(".")[0]
    return f"{path}:{lines.get(key, 1)}: {message}"


def _plan_of(table: Mapping[str, object]) -> Plan:
    keys = ("tensor", "grid", "rules", "integers", "tables")
    _require_known("", table, keys, required=("rules",) if "grid" in table else ("tensor", "rules"))
    sizes = {key: table[key] for key in ("tensor", "grid") if key in table}
    for key, value in sizes.items():
        if not _is_list_of(int, value):
            raise _wrong(key, "a list of numbers of ranks", value)
    integers = {
        name: {key: _numbers(f"integers.{name}.{key}", value) for key, value in attributes.items()}
        for name, attributes in _sections("integers", table).items()
    }
    rules = {
        name: _record(Rule, f"rules.{name}", section, {"style": _style}, required="style")
        for name, section in _sections("rules", table).items()
    }
    tables = {
        name: _record(Table, f"tables.{name}", section, {}, required="dimension")
        for name, section in _sections("tables", table).items()
    }
    numbers = {key: _numbers(key, value) for key, value in sizes.items()}
    return Plan(rules=rules, integers=integers, tables=tables, **numbers)


def _sections(key: str, table: Mapping[str, object]) -> dict[str, Mapping[str, object]]:
    """Return the sections under a key, by the names of modules."""
    found = table.get(key, {})
    if not isinstance(found, Mapping):
        raise _wrong(key, "sections with the names of modules", found)
    for name, section in found.items():
        if not isinstance(section, Mapping):
            raise _wrong(f"{key}.{name}", "a section", section, "Put quotes around the name of the module.")
    return dict(found)


def _record(
    kind: Callable[..., _T],
    name: str,
    section: Mapping[str, object],
    converters: Mapping[str, Callable[[str, Any], Any]],
    *,
    required: str,
) -> _T:
    """Make a rule or a table of a section of the file."""
    known = [each.name for each in fields(kind)]  # type: ignore[arg-type]
    _require_known(f"{name}.", section, known, required=(required,))
    values: dict[str, object] = {}
    for key, value in section.items():
        is_right, told = _KINDS[key]
        if not is_right(value):
            raise _wrong(f"{name}.{key}", told, value)
        values[key] = tuple(value) if isinstance(value, list) else value
        if key in converters:
            values[key] = converters[key](f"{name}.{key}", value)
    return kind(**values)


def _style(name: str, value: str) -> Style:
    if value not in [*Style]:
        found = nearest(value, Style)
        raise ConfigError(f"`{name}` must be a style of a plan, but is `{value}`.{advice(found, Style)}")
    return Style(value)


def _require_known(
    prefix: str, table: Mapping[str, object], known: list[str] | tuple[str, ...], *, required: tuple[str, ...]
) -> None:
    """Raise `ConfigError` if a table has an unknown key, or lacks a required one."""
    for key in table:
        if key not in known:
            remedy = advice(nearest(key, known), known)
            where = "" if prefix else " If it is a module, write it under `rules`, with quotes around its name."
            raise ConfigError(f"`{prefix}{key}` must be a key of a plan, but is unknown.{remedy}{where}")
    for key in required:
        if key not in table:
            raise ConfigError(f"`{prefix}{key}` must be given, but is missing. Add the line.")


def _numbers(name: str, value: object) -> tuple[int, ...]:
    if not isinstance(value, list) or not _is_list_of(int, value):
        raise _wrong(name, "a list of whole numbers, one for each number of ranks in `tensor`", value)
    return tuple(value)


def _wrong(name: str, must_be: str, value: object, remedy: str = "Correct the value.") -> ConfigError:
    return ConfigError(f"`{name}` must be {must_be}, but is {shown(value)}. {remedy}")


def _is_list_of(kind: type, value: object) -> bool:
    return isinstance(value, list) and all(type(each) is kind for each in value)
