"""Check of a published `generation_config.json` before text is generated.

Crosscut stops where the file says. How tokens are sampled belongs to the options of a command or of a request, so the
file's values for sampling are suggestions: they are named, and not followed. Constraints on the text, such as
suppressed or forced tokens, are refused.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from crosscut.config.checks import shown
from crosscut.config.errors import ConfigError
from crosscut.config.generation.sampling import Sampling
from crosscut.config.published.folders import GENERATION_FILE, MODEL_FILE
from crosscut.config.published.keys.generation import GENERATION, SAMPLING_WITHOUT_OPTION
from crosscut.config.system.files import read_json

_SUGGESTED = ("temperature", "top_k", "top_p", "repetition_penalty", "stop")
"""Fields of `Sampling` for which a file may suggest a value."""


def check_generation(folders: Iterable[Path], sampling: Sampling | None, remedy: str) -> list[str]:
    """Check the `generation_config.json` in each of `folders`, before text is generated. As in `transformers`, the keys
    of a `config.json` apply in a folder without this file.

    Raises `ConfigError` for a value that Crosscut does not support. Returns lines for the user: about keys that
    Crosscut does not know, and about suggestions that differ from `sampling`, with `remedy` at the end. Without
    `sampling`, all suggestions are named.
    """
    return [notice for folder in folders for notice in _check(folder, sampling, remedy) if notice]


def _check(folder: Path, sampling: Sampling | None, remedy: str) -> Iterator[str]:
    path = folder / GENERATION_FILE
    if path.is_file():
        table = read_json(path)
    elif (path := folder / MODEL_FILE).is_file():
        known = {*GENERATION.known()}
        table = {key: value for key, value in read_json(path).items() if key in known and value is not None}
    else:
        return
    yield GENERATION.check(table, path)
    usual = {name: getattr(sampling, name) for name in _SUGGESTED} if sampling else {}
    found = suggestions(table, path)
    differing = {name: value for name, value in found.items() if name not in usual or usual[name] != value}
    for key, nothing in SAMPLING_WITHOUT_OPTION.items():
        if table.get(key) not in (nothing, None):
            differing[key] = table[key]
    if differing:
        named = ", ".join(f"{name} = {shown(list(v) if name == 'stop' else v)}" for name, v in differing.items())
        yield f"`{path}` suggests {named}. {remedy}"


def suggestions(table: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Return the values of `Sampling` that the `generation_config.json` at `path`, with the content `table`, suggests.
    Raises `ConfigError` for a value that `Sampling` refuses.
    """
    found = {name: table[name] for name in ("top_k", "top_p", "repetition_penalty", "temperature") if name in table}
    found = {name: value for name, value in found.items() if value is not None}
    for name, value in found.items():
        if type(value) not in (int, float) or not math.isfinite(value):
            raise ConfigError(f"`{name}` in `{path}` must be a number, but is {shown(value)}. Correct the file.")
        if name == "top_k" and type(value) is not int:
            raise ConfigError(f"`{name}` in `{path}` must be a whole number, but is {shown(value)}. Correct the file.")
    if table.get("do_sample") is False:
        found = {name: value for name, value in found.items() if name == "repetition_penalty"} | {"temperature": 0.0}
    if strings := table.get("stop_strings"):
        listed = [strings] if isinstance(strings, str) else strings
        if not isinstance(listed, list) or not all(isinstance(text, str) for text in listed):
            raise ConfigError(
                f"`stop_strings` in `{path}` must be a list of texts, but is {shown(strings)}. Correct the file."
            )
        found["stop"] = tuple(listed)
    try:
        Sampling(**found)
    except ConfigError as error:
        raise ConfigError(f"{error} The value is in `{path}`. Correct the file.") from None
    return found
