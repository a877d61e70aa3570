"""Load a checked `RunConfig` or `CorpusConfig` from a TOML file and command-line overrides, and write it as TOML."""

import dataclasses
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from crosscut.config.axes import OPTIONS
from crosscut.config.checks import require_local_path, require_text, shown
from crosscut.config.corpora import CorpusConfig
from crosscut.config.errors import ConfigError
from crosscut.config.layout import Layout
from crosscut.config.loading.building import Override, SectionBuilder, Table, parsed
from crosscut.config.loading.keys import advice, keys_of, meant_keys, nearest
from crosscut.config.loading.mistakes import Mistakes
from crosscut.config.loading.recipe import expand_recipe
from crosscut.config.loading.toml_lines import key_lines
from crosscut.config.loading.upcycling import settings_of_copies
from crosscut.config.published.folders import TOKENIZER_FILE, is_published, read_published
from crosscut.config.published.presets import MODERN, PRESETS
from crosscut.config.run import RunConfig
from crosscut.config.system.files import parse_toml, read_small, write_whole


def load_run(
    source: Path | Mapping[str, object],
    overrides: Iterable[str] = (),
    *,
    change_layout: Callable[[Layout], Layout] | None = None,
) -> RunConfig:
    """Load a run.

    `source` is a TOML file or a table that is already parsed. `overrides` are strings `section.key=value`, with the
    value in TOML syntax; a bare word is a string. The run's `recipe` gives the settings that the run leaves out. An
    override of `model.preset` replaces the file's preset, or the whole model section if the file has no preset.
    `change_layout` takes the run's layout, which need not suit the model, and returns the layout to use instead.

    Raises `ConfigError` if the file does not exist or does not parse. Unknown keys, values of the wrong type and values
    out of range are collected, and one `ConfigError` reports all of them. The message gives the line of each mistake in
    the file and, for an unknown key, the key that the user may have meant.
    """
    overrides = tuple(overrides)
    table, mistakes = _read(source, keys_of(RunConfig))
    if any(override.startswith("model.preset=") for override in overrides):
        _leave_model_out(table)
    _override(table, overrides, mistakes)
    preset = _expand_preset(table, mistakes)
    _expand_published(table, mistakes)
    builder = SectionBuilder(keys_of(RunConfig), mistakes)
    if change_layout is not None and (own := builder.build(Layout, table.get("layout", {}), "layout")) is not None:
        table["layout"] = dataclasses.asdict(change_layout(own))
    expand_recipe(table, preset, mistakes)
    return builder.build_whole(RunConfig, table)


def load_corpus(source: Path | Mapping[str, object], overrides: Iterable[str] = ()) -> CorpusConfig:
    """Load a corpus from a TOML file or a parsed table, with overrides as in `load_run`. Overrides cannot change the
    sources. Raises `ConfigError` with all mistakes.
    """
    table, mistakes = _read(source, keys_of(CorpusConfig))
    _override(table, overrides, mistakes)
    return SectionBuilder(keys_of(CorpusConfig), mistakes).build_whole(CorpusConfig, table)


def is_corpus(path: Path) -> bool:
    """Whether a TOML file describes a corpus rather than a run. Only a corpus has the key `sources`. Raises
    `ConfigError` if the file cannot be read.
    """
    return "sources" in _read_toml(path)[0]


def load_layout(text: str, like: Layout | None = None) -> Layout:
    """Parse a layout such as `tensor=4,data=2`. Axes that the text does not name have one rank. All other settings that
    the text does not name, such as `sharding`, are those of the layout `like`. Raises `ConfigError` with all mistakes,
    and `LayoutError` if the settings do not fit together.
    """
    keys = keys_of(Layout, "layout.")
    table, mistakes = _read(dataclasses.asdict(like or Layout()) | dict.fromkeys(OPTIONS, 1), keys)
    parts = re.split(r",(?![^\[]*\])", text)  # the commas of a list do not separate settings
    _override(table, [part.strip() for part in parts if part.strip()], mistakes)
    return SectionBuilder(keys, mistakes).build_whole(Layout, table, "layout")


def meant_settings(name: str) -> list[str]:
    """Keys of a run that a user may have meant by `name`, with or without its section. Empty if no key is similar."""
    keys = keys_of(RunConfig)
    return [name] if name in keys else meant_keys(name, keys)


def with_line(message: str, path: Path, overrides: Iterable[str] = ()) -> str:
    """Put the config file and the line number of the wrong key in front of an error message.

    The message is unchanged if it names no key of the file, if one of the `overrides` sets the key, or if the message
    already has a line number.
    """
    text = _read_toml(path)[1]
    mistakes = Mistakes(key_lines(text), file=path, text=text)
    for override in overrides:
        mistakes.override(override.partition("=")[0])
    return message if f"{path}:" in message else mistakes.placed(message)


def dump_toml(config: RunConfig | CorpusConfig) -> str:
    """Dump the whole resolved run or corpus as TOML. Loading the TOML gives an equal config."""
    import tomli_w  # imported only here: the rest of the module works without tomli_w

    return tomli_w.dumps(dataclasses.asdict(config))


def write_toml(config: RunConfig | CorpusConfig, path: Path) -> None:
    """Write the whole resolved run or corpus to a TOML file, atomically."""
    write_whole(path, dump_toml(config))


def _read(source: Path | Mapping[str, object], keys: Iterable[str]) -> tuple[Table, Mistakes]:
    """Read the table of a config. Return the table and an object that collects mistakes, which is still empty. `keys`
    are all keys that the config may have.
    """
    if not isinstance(source, Path):
        return {key: _copy(value) for key, value in source.items()}, Mistakes(keys)
    table, text = _read_toml(source)
    return table, Mistakes(keys, file=source, text=text)


def _copy(value: object) -> object:
    return {key: _copy(inner) for key, inner in value.items()} if isinstance(value, Mapping) else value


_TEXT = re.compile(r"\.(txt|jsonl|tsv|parquet)(\.(gz|bz2|zst|xz))?$")
"""Suffixes of the files that `data.text` takes."""


def _read_toml(path: Path) -> tuple[Table, str]:
    """Read a TOML file. Return the table and the text."""
    try:
        text = read_small(path)
        return parse_toml(text), text
    except FileNotFoundError:
        found = meant_settings(str(path))
        remedy = f" To set `{found[0]}`, type {found[0]}=VALUE." if found and not path.suffix else ""
        raise ConfigError(
            f"`{path}` must be a TOML file, but does not exist.{remedy} Try `examples/gpt2-small.toml`, or leave "
            "out the file to run the demo."
        ) from None
    except OSError as error:
        raise ConfigError(f"`{path}` must be a readable TOML file, but is not: {error.strerror}.") from None
    except ValueError as error:
        if _TEXT.search(path.name):
            raise ConfigError(
                f"`{path}` must be a TOML file, but its name is that of a text. To train on it, type data.text={path}."
            ) from None
        if isinstance(error, tomllib.TOMLDecodeError):
            raise ConfigError(_not_toml(path, text, str(error))) from None
        raise ConfigError(f"`{path}` must be valid TOML, but is not: {error}.") from None


def _not_toml(path: Path, text: str, reason: str) -> str:
    """Message for a text that is not TOML, starting with the file and the line number. `reason` is the message of
    Python's parser, which ends with the line and the column, or with "at end of document".
    """
    lines = text.splitlines() or [""]
    place = re.search(r" \(at (?:line (\d+), column (\d+)|end of document)\)$", reason)
    if place is None:
        return f"`{path}` must be valid TOML, but is not: {reason}."
    number = min(int(place[1]), len(lines)) if place[1] else len(lines)
    line, what = lines[number - 1].strip(), reason[: place.start()]
    if re.fullmatch(r"[\w-]+\s*=.*|\[.*", line) and re.match("Cannot overwrite a value|Cannot declare .* twice", what):
        headers = [other.strip("[ ]") for other in map(str.strip, lines[:number]) if other.startswith("[")]
        name = ".".join([*headers[-1:], *([] if line.startswith("[") else [line.partition("=")[0].strip()])])
        return f"{path}:{number}: `{name}` must be given once, but is given twice. Remove one of the two."
    column = f"column {place[2]}" if place[2] else "end of the file"
    remedy = " Strings need quotes; true and false are written in lower case." if what == "Invalid value" else ""
    return f"{path}:{number}: `{line[:80]}` must be valid TOML, but is not: {what} ({column}).{remedy}"


def _leave_model_out(table: Table) -> None:
    """Remove the file's model section if it names no preset. Otherwise its keys would change the preset that an
    override names. If the section gives all that a recipe sets in a model, as the resolved file of a run does, the
    recipe goes too: it would set the same keys again.
    """
    if isinstance(model := table.get("model"), dict) and "preset" not in model:
        del table["model"]
        if MODERN.keys() <= model.keys():
            table.pop("recipe", None)


def _override(table: Table, overrides: Iterable[str], mistakes: Mistakes) -> None:
    for override in overrides:
        name, equals, text = override.partition("=")
        mistakes.override(name)
        try:
            if not equals or not name:
                raise ConfigError(f"An override must be `section.key=value`, but is `{override}`.")
            if name.startswith("-"):
                raise _dashed(name, text)
            _apply(table, name, text, mistakes)
        except ConfigError as error:
            mistakes.note(error, name)


def _dashed(option: str, value: str) -> ConfigError:
    """Error for a setting that was typed with dashes, like an option."""
    settings = " or ".join(f"{key}={value}" for key in meant_settings(option.lstrip("-")))
    return ConfigError(
        f"`{option}` must be an option of this command, but there is no such option. Settings are written without "
        f"dashes: {settings}."
    )


def _apply(table: Table, name: str, text: str, mistakes: Mistakes) -> None:
    *sections, key = name.split(".")
    for depth, section in enumerate(sections, 1):
        inside = table.setdefault(section, {})
        if not isinstance(inside, dict):
            mistakes.doubt([".".join(sections[:depth])])
            raise ConfigError(f"`{name}` must name a key of a section, but `{section}` is a value.")
        table = inside
    table[key] = Override(text)


def _expand_preset(table: Table, mistakes: Mistakes) -> str:
    """Replace `model.preset` with the settings of the model. Returns the name of the preset, or an empty string.

    A misspelt name is recorded as a mistake. The most similar preset is used in its place, so that the other settings
    are checked. If no preset is similar, the settings that every preset gives are unknown. Errors that name one of
    these settings are not recorded, unless the user gives the setting.
    """
    model = table.get("model")
    if not isinstance(model, dict) or "preset" not in model:
        return ""
    name = parsed(model.pop("preset"))
    if isinstance(name, str) and name in PRESETS:
        table["model"] = _over(PRESETS[name], model)
        return name
    close = nearest(shown(name), PRESETS)
    mistakes.note(ConfigError(f"`model.preset` must name a preset, but is {shown(name)}.{advice(close, PRESETS)}"))
    if close:
        table["model"] = _over(PRESETS[close[0]], model)
        return close[0]
    given_by_all = set.intersection(*map(set, PRESETS.values()))
    mistakes.doubt(f"model.{key}" for key in given_by_all if key not in model)
    return ""


def _over(settings: Table, given: Table) -> Table:
    """Return `settings` with those of `given` over them, also inside of sections."""
    merged = {**settings, **given}
    for key, value in given.items():
        section = settings.get(key)
        if isinstance(value, dict) and isinstance(section, dict):
            merged[key] = {**section, **value}
    return merged


_OWN = {
    "dropout",
    "vocab_multiple",
    "lora_rank",
    "lora_alpha",
    "chunk_size",
    "balance_loss",
    "balance_rate",
    "router_z_loss",
}
"""Settings of the model and of its sections that a run may choose even if it starts from a published model."""

_LENGTHENING = {
    "max_sequence_length",
    "rotary_base",
    "rotary_scaling",
    "rotary_factor",
    "rotary_original_length",
    "rotary_attention_factor",
}
"""Further settings that a run may choose if the published model has rotary positions and no sliding window. These
settings let the model read longer sequences, and do not change the shape of any weight."""


def _expand_published(table: Table, mistakes: Mistakes) -> None:
    """Fill in the model and the tokenizer from the folder in `training.initialize_from`.

    A resumed run does not need the folder, because its resolved config already contains the model and the tokenizer.
    """
    training, model, data = (table.get(name, {}) for name in ("training", "model", "data"))
    if not (isinstance(training, dict) and isinstance(model, dict) and isinstance(data, dict)):
        return
    name = parsed(training.get("initialize_from", ""))
    if not isinstance(name, str) or not name:
        return
    try:
        require_text("`training.initialize_from`", name)
        require_local_path("training.initialize_from", name)
        if model and not is_published(Path(name)):
            return
        source = read_published(Path(name))
        published = dataclasses.asdict(source.model)
        own = _OWN | _LENGTHENING if source.can_read_longer else _OWN
        if copies := settings_of_copies(source.model, model, name):
            published["experts"], own = copies, own | {"layers"}
        table["model"] = _over(published, _agreeing(model, published, name, own))
    except ConfigError as error:
        mistakes.note(error, "training.initialize_from")
        mistakes.doubt(["model", "data.tokenizer"])
    if data.get("text") and not data.get("tokenizer"):
        data["tokenizer"] = str(Path(name) / TOKENIZER_FILE)


def _agreeing(model: Table, published: Table, folder: str, own: set[str], path: str = "model") -> Table:
    """Keys of a run's section `path` that may differ from the folder's model: the keys in `own`, and unknown keys,
    which are reported later. Raises `ConfigError` for any other key that contradicts the folder.
    """
    found: Table = {}
    for key in published.keys() & model.keys() - own:
        theirs, inner = published[key], model[key]
        if isinstance(theirs, dict) and isinstance(inner, dict):
            found[key] = _agreeing(inner, theirs, folder, own, f"{path}.{key}")
            continue
        given = parsed(model[key])
        given = tuple(given) if isinstance(given, list) else given
        if given != published[key] and not (type(given) is int and given == 0):  # 0 means the default
            raise ConfigError(
                f"`{path}.{key}` must be {shown(published[key])}, but is {shown(given)}. The run starts from the model "
                f"in `{folder}` (`training.initialize_from`). Remove `{path}.{key}`."
            )
    return found | {key: value for key, value in model.items() if key in own or key not in published}
