"""Build a config dataclass from nested tables. All mistakes are recorded, not only the first one."""

import dataclasses
import glob
import json
import re
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from math import isnan
from pathlib import Path
from typing import Any, TypeVar

from crosscut.config.checks import MOST_SEED, Choice, require_one_of, require_text, shown
from crosscut.config.corpora import CorpusConfig
from crosscut.config.errors import ConfigError
from crosscut.config.loading.keys import advice, meant_keys, nearest, quoted, section_of
from crosscut.config.loading.mistakes import Mistakes
from crosscut.config.model import ModelConfig
from crosscut.config.parts.kinds import layers_of_mlps
from crosscut.config.run import RunConfig
from crosscut.config.system.files import parse_toml
from crosscut.config.system.records import Kind, fields_of

_T = TypeVar("_T")

Table = dict[str, object]
"""Settings that are not checked yet, keyed by section or by field."""

_MOST_SECTIONS = 1000
"""Maximum number of sections in an array of sections, such as the folders of a mixture."""
_MOST_COMMAS = 8
"""Maximum number of commas in the name of a file in a list without quotes, plus 1."""
_MOST_UNKNOWN = 100
"""Maximum number of unknown keys to report per section. For each unknown key, the search for the key that the user
meant takes time."""


class Override(str):
    """A value from the command line as the user typed it. The key decides how the value is interpreted."""

    def parsed(self) -> object:
        """The value parsed as TOML, or the unchanged string if it is not valid TOML."""
        try:
            table = parse_toml(f"value = {self}")
        except ValueError:
            return str(self)
        return table["value"] if len(table) == 1 else str(self)  # a string with line breaks may parse as several keys

    def items(self) -> object:
        """The value of a key that takes a list: a TOML array, or items with commas between them, as in `a.txt,b.txt`
        and `[a.txt, b.txt]`. Each item is an `Override`. The name of an existing file and a glob that matches files may
        contain commas and brackets.
        """
        value, inner = self.parsed(), self.strip()
        if isinstance(value, list | dict):
            return value
        if value != self or _is_path(self):  # quoted, a number, or the name of a file
            return [self]
        if inner.startswith("[") and inner.endswith("]"):
            inner = inner[1:-1].rstrip().removesuffix(",")
        elif _is_file(self):
            return [self]
        return [Override(item) for item in _joined_files(_ITEM.findall(inner))]

    def as_text(self) -> str:
        """The value of a key that takes a string. A title 1984 stays a string."""
        plain = self.parsed()
        return plain if isinstance(plain, str) else str(self)


_ITEM = re.compile(r"""(?:^|(?<=,))(?:\s*(?:"[^"]*"|'[^']*')\s*(?=,|$)|[^,]*)""")
"""An item between commas. Commas between quotes belong to the item."""


def _is_path(text: str) -> bool:
    """Whether a text is the path of a file or folder."""
    try:
        return Path(text).expanduser().exists()
    except (OSError, ValueError, RuntimeError):
        return False


def _is_file(text: str) -> bool:
    """Whether a text is the path of a file or folder, or a glob that matches one."""
    return _is_path(text) or (glob.has_magic(text) and any(glob.iglob(text, recursive=True)))  # noqa: PTH207 - Path.glob takes no absolute pattern


def _joined_files(parts: list[str]) -> Iterator[str]:
    """Yield the items of a list that was split at commas. Parts that together are the name of a file are one item."""
    start = 0
    while start < len(parts):
        ends = range(min(len(parts), start + _MOST_COMMAS), start + 1, -1)
        end = next((end for end in ends if _is_file(",".join(parts[start:end]).strip())), start + 1)
        yield ",".join(parts[start:end]).strip()
        start = end


def parsed(value: object) -> object:
    """Return the parsed value of an override. Any other value is returned unchanged."""
    return value.parsed() if isinstance(value, Override) else value


class SectionBuilder:
    """Builder of one config. It records every mistake in `mistakes`.

    `keys` are the names of all keys that the config may have. After a mistake in a value, the builder continues with
    the default of this value to find further mistakes.
    """

    def __init__(self, keys: Iterable[str], mistakes: Mistakes) -> None:
        self._keys = tuple(keys)
        self._mistakes = mistakes
        self._given: set[str] = set()

    def build_whole(self, kind: type[_T], table: object, path: str = "") -> _T:
        """Build the dataclass `kind` from a table. Raises `ConfigError` with all mistakes."""
        built = self.build(kind, table, path)
        self._mistakes.raise_all()
        return typing.cast(_T, built)

    def build(self, kind: type[_T], table: object, path: str = "", place: str = "") -> _T | None:
        """Build the dataclass `kind` from a table, recursively. Returns None if a mistake makes this impossible.

        `path` is the dotted name of the table, such as `data.mixture`. For a table in an array of tables, `place` is
        this name with an index: `data.mixture.1` is the second table `[[data.mixture]]`. By default, `place` is `path`.
        """
        table, place = parsed(table), place or path
        if self._mistakes.is_doubtful(path):
            return None
        if not isinstance(table, Mapping):
            self._note(f"`{path}` must be a section, but is {shown(table)}.{advice(meant_keys(path, self._keys))}")
            return None
        meant = self._refuse_unknown(kind, table, path, place)
        values = self._values(kind, {**table, **meant}, path, place)
        return None if values is None else self._construct(kind, values, path, place)

    def _note(self, message: str, place: str = "") -> None:
        self._mistakes.note(ConfigError(message), place)

    def _refuse_unknown(self, kind: type, table: Mapping[str, object], path: str, place: str) -> Table:
        """Record as mistakes the keys that `kind` does not have, but at most `_MOST_UNKNOWN` of them. If the key of a
        required field is misspelt, the result maps the correct key to the given value, so that other checks can use
        this value.
        """
        hints, required = fields_of(kind)[0], _required(kind, table)
        known, meant = list(hints), Table()
        if not path and self._refuse_mixed(kind, table):
            return {}
        for key in islice((key for key in table if key not in known), _MOST_UNKNOWN):
            if not path:
                self._refuse_at_top(kind, key, table[key])
            else:
                name = f"{path}.{key}"
                found = meant_keys(name, self._keys)
                choices = advice(found, [*known, "preset"] if path == "model" else known)
                if name in ("model.mlp", "model.mlp_pattern") and (layers := layers_of_mlps(table[key])):
                    choices = f" Write layers = {json.dumps(layers)} in its place."
                self._note(f"`{name}` must be a key of `{path}`, but there is no such key.{choices}", f"{place}.{key}")
                self._mistakes.doubt(found)
                meant |= {field: table[key] for field in required if [_joined(path, field)] == found}
        return {field: value for field, value in meant.items() if field not in table}

    def _refuse_mixed(self, kind: type, table: Mapping[str, object]) -> bool:
        """Record one mistake for all sections of a run in the file of a corpus, or the other way round. Return whether
        there are any.
        """
        known = fields_of(kind)[0]
        others = {key: whole for other, whole in _WHOLES.items() if other is not kind for key in fields_of(other)[0]}
        mixed = [key for key in table if key not in known and key in others]
        if mixed:
            self._note(
                f"The file of {_WHOLES[kind]} must not have sections of {others[mixed[0]]}, but has "
                f"{', '.join(f'`{key}`' for key in mixed)}. Describe the corpus in a file of its own, prepare it "
                "with `crosscut prepare`, and give the run the folder with its tokens: `data.tokens`.",
                mixed[0],
            )
        return bool(mixed)

    def _refuse_at_top(self, kind: type, key: str, value: object) -> None:
        """Record a mistake for a key without a section, or for each key of an unknown section."""
        names = [f"{key}.{inner}" for inner in value] if isinstance(value, Mapping) else [key]
        found = {name: meant_keys(name, self._keys) for name in names}
        if not any(found.values()):
            known = fields_of(kind)[0]
            close = nearest(key, known)
            self._note(
                f"`{key}` must be a section of {_WHOLES[kind]}, but there is no such key.{advice(close, known)}", key
            )
            self._mistakes.doubt(close)
            return
        for name, keys in found.items():
            self._note(f"`{name}` must be a key of {_WHOLES[kind]}, but there is no such key.{advice(keys)}", name)
            self._mistakes.doubt(keys)

    def _values(self, kind: type, table: Mapping[str, object], path: str, place: str) -> Table | None:
        """Values of the fields that the table gives. None if a section is missing or cannot be built, or if a value
        without a default is missing. The section of the model is an exception: stand-ins replace its missing values, so
        that its other fields and the other sections are still checked.
        """
        hints, required = fields_of(kind)[0], _required(kind, table)
        values, failed = Table(), set[str]()
        for key in (key for key in table if key in hints):
            name, at = _joined(path, key), _joined(place, key)
            try:
                values[key] = self._convert(hints[key], table[key], name, at)
                self._given.add(name)
            except ConfigError as error:
                self._mistakes.note(error, at)
                self._mistakes.doubt([name])
            if values.get(key) is None and (section_of(hints[key]) or key in required):
                failed.add(key)
        failed.update(self._missing(kind, table, path, place))
        if path == "model":
            for key in failed:
                if section_of(hints[key]):  # the section's defaults stand in
                    values.pop(key, None)
                else:
                    self._stand_in(key, values)
            return values
        return None if failed else values

    def _missing(self, kind: type, table: Mapping[str, object], path: str, place: str) -> list[str]:
        """Required fields that the table does not give. They are recorded as mistakes, unless the table also has an
        unknown key that resembles no known one, because that key may be a required field under a wrong name.
        """
        known = fields_of(kind)[0]
        missing = [key for key in _required(kind, table) if key not in table]
        names = [name for key in missing if not self._mistakes.is_doubtful(name := _joined(path, key))]
        if names and all(key in known or meant_keys(_joined(path, key), self._keys) for key in table):
            verb = "is" if len(names) == 1 else "are"
            hint = _MODEL_HINT if "model" in (path, *names) else ""
            self._note(f"{quoted(names)} must be given, but {verb} missing.{hint}", place)
        return missing

    def _stand_in(self, key: str, values: Table) -> None:
        """Replace a missing or wrong size of the model with a stand-in, a value with which the other fields can be
        checked.

        The user did not give this value, so mistakes that name the size, or a size that is computed from it, are not
        recorded.
        """
        heads = typing.cast(int, values.get("num_heads", 1))
        values[key] = _HEAD_SIZE * min(max(heads, 1), _MOST_HEADS) if key == "hidden_size" else 1
        derived = [name for name in _DERIVED.get(key, ()) if not values.get(name)]
        self._mistakes.doubt(f"model.{name}" for name in (key, *derived))

    def _construct(self, kind: Callable[..., _T], values: Table, path: str, place: str) -> _T | None:
        """Create the dataclass. If the dataclass refuses a value, the mistake is recorded and the default is used."""
        while True:
            try:
                return kind(**values)
            except ConfigError as error:
                names = self._mistakes.named_in(str(error))
                inside = [name for name in names if place != path and name.startswith(f"{path}.")]
                self._mistakes.note(error, f"{place}{inside[0].removeprefix(path)}" if inside else "")
                if not self._leave_out(kind, values, names, path):
                    return None

    def _leave_out(self, kind: Kind, values: Table, names: Iterable[str], path: str) -> bool:
        """Find the first key of `names` that the user gave, and replace its value with the default. A model size
        that has no default gets a stand-in. Returns whether a value was replaced.

        `values` holds the values of a section or, at the top level, whole sections.
        """
        name = next((name for name in names if name in self._given), "")
        section, _, key = name.removeprefix(f"{path}.").rpartition(".")
        inner: Kind = values.get(section)
        owner = type(inner) if section else kind
        hints = fields_of(owner)[0] if dataclasses.is_dataclass(owner) else {}
        is_required = key in hints and key in _required(owner, values)
        if key not in hints or (is_required and kind is not ModelConfig):
            return False
        self._given.discard(name)
        if is_required:
            self._stand_in(key, values)
            return True
        self._mistakes.doubt([name])
        if not section:
            del values[key]
            return True
        try:
            values[section] = dataclasses.replace(inner, **{key: getattr(owner, key)})
        except ConfigError:  # the default does not suit the other values of the section
            return False
        return True

    def _convert(self, kind: Any, value: object, name: str, place: str) -> object:
        if typing.get_origin(kind) is typing.Annotated:
            return self._convert(typing.get_args(kind)[0], value, name, place)
        if isinstance(kind, type) and issubclass(kind, Choice):
            if not isinstance(value, str):
                require_one_of(name, value, kind)
            return self._convert(str, value, name, place)  # the dataclass replaces the string with a member
        section, is_tuple = section_of(kind), typing.get_origin(kind) is tuple
        if isinstance(value, Override):
            is_list = is_tuple and section is None
            value = value.items() if is_list else value.as_text() if kind is str else value.parsed()
        if section is not None:
            return (self._items if is_tuple else self.build)(section, value, name, place)
        if is_tuple:
            return _scalars(int if typing.get_args(kind)[0] is int else str, value, name)
        if kind is float and type(value) is int and abs(value) <= MOST_SEED:
            return float(value)
        if type(value) is not kind and not (kind is str and isinstance(value, Choice)):
            raise ConfigError(f"`{name}` must be {_TYPE_NAMES[kind]}, but is {shown(value)}.")
        _require_usual(name, value)
        return value

    def _items(self, item: type[_T], value: object, name: str, place: str) -> tuple[_T, ...] | None:
        """Build an array of tables. Returns None if an item cannot be built."""
        if not isinstance(value, list | tuple):
            raise ConfigError(f"`{name}` must be one or more sections [[{name}]], but is {shown(value)}.")
        if len(value) > _MOST_SECTIONS:
            raise ConfigError(
                f"`{name}` must have at most {_MOST_SECTIONS:,} sections, but has {len(value):,}. Remove some sections."
            )
        items = [self.build(item, table, name, f"{place}.{index}") for index, table in enumerate(value)]
        built = tuple(one for one in items if one is not None)
        return built if len(built) == len(items) else None


def _scalars(kind: type[int] | type[str], value: object, name: str) -> tuple[int | str, ...]:
    """Read a list of integers or of strings. A string alone is a list of one string."""
    items = [value] if kind is str and isinstance(value, str) else value
    if isinstance(items, list | tuple):
        items = [
            item if not isinstance(item, Override) else item.as_text() if kind is str else item.parsed()
            for item in items
        ]
    if not isinstance(items, list) or not all(isinstance(item, kind) and type(item) is not bool for item in items):
        raise ConfigError(f"`{name}` must be a list of {_ITEM_NAMES[kind]}, but is {shown(items)}.")
    for item in items:
        _require_usual(name, item)
    return tuple(items)


def _require_usual(name: str, value: object) -> None:
    """Raise `ConfigError` for a number that no field can have, such as nan or a number beyond 64 bits."""
    if isinstance(value, int) and abs(value) > MOST_SEED:
        raise ConfigError(f"`{name}` must be between -2^63 and 2^63, but is {shown(value)}.")
    if isinstance(value, float) and isnan(value):
        raise ConfigError(f"`{name}` must be a number, but is nan.")
    if isinstance(value, str):
        require_text(f"`{name}`", value)


def _required(kind: Any, table: Mapping[str, object]) -> tuple[str, ...]:
    """Fields that a table must give: those without a default and, for layers with attention, the number of heads."""
    required = fields_of(kind)[1]
    if kind is not ModelConfig or ("layers" in table and "attention" not in str(table["layers"])):
        return required
    return (*required, "num_heads")


def _joined(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


_MODEL_HINT = (
    f" Give {quoted([f'model.{name}' for name in _required(ModelConfig, {})])}, or a `model.preset` such as "
    "`gpt2-small`, `llama3-8b` or `demo` (docs/configuration.md lists all presets)."
)
"""Advice for a model section without sizes. Starts with a space."""

_HEAD_SIZE, _MOST_HEADS = 128, 1 << 13
"""If the hidden size is unknown, its stand-in is `_HEAD_SIZE` x the number of heads. Above `_MOST_HEADS` heads, the
stand-in does not grow further."""

_DERIVED: Mapping[str, tuple[str, ...]] = types.MappingProxyType(
    {"hidden_size": ("head_size", "mlp_size"), "num_heads": ("head_size", "num_kv_heads")}
)
"""Fields of a model whose defaults are computed from another size, keyed by the name of that size."""


_TYPE_NAMES: Mapping[type, str] = types.MappingProxyType(
    {int: "a whole number", float: "a number", bool: "true or false", str: "a string"}
)

_ITEM_NAMES: Mapping[type, str] = types.MappingProxyType({int: "integers", str: "strings"})

_WHOLES: Mapping[type, str] = types.MappingProxyType({RunConfig: "a run", CorpusConfig: "a corpus"})
