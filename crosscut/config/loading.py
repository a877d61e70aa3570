"""Loading of a checked `RunConfig` or `CorpusConfig` from a TOML file and command-line overrides, and writing to
TOML.
"""

import dataclasses
import difflib
import types
import typing
from collections.abc import Iterable, Mapping
from math import isnan
from pathlib import Path
from typing import Any

from crosscut.config.checks import MOST_SEED, Choice, listed, require_text, shown
from crosscut.config.corpora import CorpusConfig
from crosscut.config.errors import ConfigError
from crosscut.config.files import parse_toml, read_small, write_whole
from crosscut.config.layout import Layout
from crosscut.config.published.folders import TOKENIZER_FILE, is_published, read_published
from crosscut.config.published.presets import PRESETS
from crosscut.config.run import RunConfig

Table = dict[str, Any]


def load_run(
    source: Path | Mapping[str, Any], overrides: Iterable[str] = (), *, layout: Layout | None = None
) -> RunConfig:
    """Load a run.

    `source` is a TOML file or a table that is already parsed. `overrides` are strings `section.key=value`, with the
    value in TOML syntax; a bare word is a string. An override of `model.preset` replaces the file's preset, or the
    whole model section if the file has no preset. A given `layout` replaces the layout section of the file and all
    overrides of this section. Raises `ConfigError` for a file that does not exist or does not parse, for an unknown key
    (the message names the nearest key), and for a value of the wrong type or out of range.
    """
    table = _read(source)
    overrides = tuple(overrides)
    if any(override.startswith("model.preset=") for override in overrides):
        _leave_model_out(table)
    _override(table, overrides)
    _expand_preset(table)
    _expand_published(table)
    if layout is not None:
        _build(Layout, table.get("layout", {}), "layout")  # the replaced layout must still be valid
        table["layout"] = dataclasses.asdict(layout)
    return typing.cast(RunConfig, _build(RunConfig, table, ""))


def load_corpus(source: Path | Mapping[str, Any], overrides: Iterable[str] = ()) -> CorpusConfig:
    """Load a corpus from a TOML file or a parsed table, with overrides as in `load_run`. Overrides cannot change the
    sources. Raises `ConfigError`.
    """
    table = _read(source)
    _override(table, overrides)
    return typing.cast(CorpusConfig, _build(CorpusConfig, table, ""))


def is_corpus(path: Path) -> bool:
    """Whether a TOML file describes a corpus rather than a run. Only a corpus has the key `sources`. Raises
    `ConfigError` if the file cannot be read.
    """
    return "sources" in _read_toml(path)


def load_layout(text: str) -> Layout:
    """Parse a layout such as `tensor=4,data=2`. Axes that the text does not name have their default sizes. Raises
    `ConfigError`.
    """
    table: Table = {}
    for part in filter(None, text.split(",")):
        _apply(table, part.strip())
    return typing.cast(Layout, _build(Layout, table, "layout"))


def dump_toml(config: RunConfig | CorpusConfig) -> str:
    """Dump the whole resolved run or corpus as TOML. Loading the TOML gives an equal config."""
    import tomli_w  # imported here only, so that a run can train from a checkout on a Python without it

    return tomli_w.dumps(dataclasses.asdict(config))


def write_toml(config: RunConfig | CorpusConfig, path: Path) -> None:
    """Write the whole resolved run or corpus to a TOML file, atomically."""
    write_whole(path, dump_toml(config))


def _read(source: Path | Mapping[str, Any]) -> Table:
    return _read_toml(source) if isinstance(source, Path) else {k: _copy(v) for k, v in source.items()}


def _leave_model_out(table: Table) -> None:
    """Remove a model section without a preset. Its keys would otherwise modify the preset that an override names."""
    if isinstance(model := table.get("model"), dict) and "preset" not in model:
        del table["model"]


def _override(table: Table, overrides: Iterable[str]) -> None:
    for override in overrides:
        _apply(table, override)


def _copy(value: Any) -> Any:
    return {k: _copy(v) for k, v in value.items()} if isinstance(value, Mapping) else value


def _read_toml(path: Path) -> Table:
    try:
        return parse_toml(read_small(path))
    except FileNotFoundError:
        raise ConfigError(
            f"`{path}` must be a TOML file, but does not exist. Try `examples/gpt2-small.toml`, or name no file to "
            "run a demo."
        ) from None
    except OSError as error:
        raise ConfigError(f"`{path}` must be a readable TOML file, but is not: {error.strerror}.") from None
    except ValueError as error:
        raise ConfigError(f"`{path}` must be valid TOML, but is not: {error}.") from None


def _apply(table: Table, override: str) -> None:
    name, equals, text = override.partition("=")
    if not equals or not name:
        raise ConfigError(f"An override must be `section.key=value`, but is `{override}`.")
    *sections, key = name.split(".")
    for section in sections:
        table = table.setdefault(section, {})
        if not isinstance(table, dict):
            raise ConfigError(f"`{name}` must name a key of a section, but `{section}` is a value.")
    table[key] = _Override(text)


class _Override(str):
    """A value from the command line as the user typed it. The key decides how the value is interpreted."""

    def parsed(self) -> Any:
        """The value parsed as TOML, or the unchanged string if it is not valid TOML."""
        try:
            table = parse_toml(f"value = {self}")
        except ValueError:
            return str(self)
        return table["value"] if len(table) == 1 else str(self)  # a string with line breaks may parse as several keys


def _expand_preset(table: Table) -> None:
    model = table.get("model")
    if not isinstance(model, dict) or "preset" not in model:
        return
    name = _parsed(model.pop("preset"))
    if not isinstance(name, str) or name not in PRESETS:
        raise ConfigError(f"`model.preset` must name a preset, but is {shown(name)}.{_nearest(shown(name), PRESETS)}")
    table["model"] = {**PRESETS[name], **model}


def _expand_published(table: Table) -> None:
    """Fill in the model, and the tokenizer for its text, from the folder in `training.initialize_from`.

    A resumed run does not need the folder, because its resolved config already contains both.
    """
    training, model, data = (table.get(name, {}) for name in ("training", "model", "data"))
    if not all(isinstance(section, dict) for section in (training, model, data)):
        return
    name = _parsed(training.get("initialize_from", ""))
    if not isinstance(name, str) or not name:
        return
    require_text("`training.initialize_from`", name)
    if model and not is_published(Path(name)):
        return
    published = dataclasses.asdict(read_published(Path(name)).model)
    table["model"] = {**published, **_agreeing(model, published, name)}
    if data.get("text") and not data.get("tokenizer"):
        data["tokenizer"] = str(Path(name) / TOKENIZER_FILE)


def _agreeing(model: Table, published: Table, folder: str) -> Table:
    """Keys of a run's model section that may differ from the folder's model: dropout, and unknown keys, which later
    raise an error. Raises `ConfigError` for any other key that contradicts the folder.
    """
    for key in published.keys() & model.keys() - {"dropout"}:
        given = _parsed(model[key])
        given = tuple(given) if isinstance(given, list) else given
        if given != published[key] and not (type(given) is int and given == 0):  # 0 means the default
            raise ConfigError(
                f"`model.{key}` must be {published[key]!r}, but is {shown(given)}. The run starts from the model in "
                f"`{folder}` (`training.initialize_from`). Remove `model.{key}`."
            )
    return {key: value for key, value in model.items() if key == "dropout" or key not in published}


def _parsed(value: Any) -> Any:
    return value.parsed() if isinstance(value, _Override) else value


def _build(kind: type, table: Any, path: str) -> Any:
    """Build the dataclass `kind` from a table, recursively. `path` is the dotted name of the table."""
    table = _parsed(table)
    if not isinstance(table, Mapping):
        raise ConfigError(f"`{path}` must be a section, but is {shown(table)}.")
    fields = {f.name: f for f in dataclasses.fields(kind)}
    types_of = typing.get_type_hints(kind)
    prefix = f"{path}." if path else ""
    for key in table:
        if key not in fields:
            extra = ["preset"] if path == "model" else []
            where = f"a key of `{path}`" if path else f"{_WHOLES[kind]}"
            raise ConfigError(
                f"`{prefix}{key}` must be {where}, but there is no such key.{_nearest(key, [*fields, *extra], prefix)}"
            )
    for name, f in fields.items():
        if name not in table and f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING:
            raise ConfigError(f"`{prefix}{name}` must be given, but is missing.{_hint(prefix + name)}")
    return kind(**{key: _convert(types_of[key], value, f"{prefix}{key}") for key, value in table.items()})


def _hint(name: str) -> str:
    return f" Name a `model.preset`: {listed(PRESETS)}." if name.startswith("model") else ""


def _convert(kind: Any, value: Any, name: str) -> Any:
    if isinstance(kind, type) and issubclass(kind, Choice):
        return _convert(str, value, name)  # the dataclass replaces the string by a member
    if isinstance(value, _Override):
        parsed = value.parsed()
        value = str(value) if kind is str and not isinstance(parsed, str) else parsed  # a title may be 1984
    if dataclasses.is_dataclass(kind):
        return _build(typing.cast(type, kind), value, name)
    if typing.get_origin(kind) is tuple and dataclasses.is_dataclass(item := typing.get_args(kind)[0]):
        if isinstance(value, list | tuple):
            return tuple(_build(typing.cast(type, item), table, name) for table in value)
        raise ConfigError(f"`{name}` must be one or more sections [[{name}]], but is {shown(value)}.")
    if typing.get_origin(kind) is tuple:
        items = [value] if isinstance(value, str) else value
        if isinstance(items, list | tuple) and all(isinstance(item, str) for item in items):
            for item in items:
                _require_usual(name, item)
            return tuple(items)
        raise ConfigError(f"`{name}` must be a list of strings, but is {shown(value)}.")
    if kind is float and type(value) is int and abs(value) <= MOST_SEED:
        return float(value)
    if type(value) is not kind and not (kind is str and isinstance(value, Choice)):
        raise ConfigError(f"`{name}` must be {_TYPE_NAMES[kind]}, but is {shown(value)}.")
    _require_usual(name, value)
    return value


def _require_usual(name: str, value: object) -> None:
    """Raise `ConfigError` for a value of the right type that no field can have, because neither a computation nor a
    file can hold it.
    """
    if isinstance(value, int) and abs(value) > MOST_SEED:
        raise ConfigError(f"`{name}` must be between -2^63 and 2^63, but is {shown(value)}.")
    if isinstance(value, float) and isnan(value):
        raise ConfigError(f"`{name}` must be a number, but is nan.")
    if isinstance(value, str):
        require_text(f"`{name}`", value)


_TYPE_NAMES: Mapping[type, str] = types.MappingProxyType(
    {int: "a whole number", float: "a number", bool: "true or false", str: "a string"}
)


_WHOLES: Mapping[type, str] = types.MappingProxyType(
    {RunConfig: "a section of a run", CorpusConfig: "a section of a corpus"}
)


def _nearest(word: str, known: Iterable[str], prefix: str = "") -> str:
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f" The nearest is `{prefix}{close[0]}`." if close else f" Choose {listed(f'`{k}`' for k in known)}."
