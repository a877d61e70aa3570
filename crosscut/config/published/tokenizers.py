"""Check of the files beside a published `tokenizer.json`.

Crosscut tokenizes as `tokenizer.json` says. `transformers` may read it with a class that makes other steps from the
settings (`tokenizer_classes`). The check compares the two:

    class                              steps that differ from `tokenizer.json`
    BertTokenizer, RobertaTokenizer    refused
    other classes                      refused if a key of `tokenizer_config.json` says so, else named in a line

Tokens that only the settings name, or name with other flags, are named in a line.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from crosscut.config.checks import shown
from crosscut.config.errors import ConfigError
from crosscut.config.published.folders import (
    MODEL_FILE,
    SPECIAL_TOKENS_FILE,
    TOKENIZER_CONFIG_FILE,
    TOKENIZER_FILE,
)
from crosscut.config.published.keys import SPECIAL_TOKENS, TOKENIZER
from crosscut.config.published.keys.form import json_shown
from crosscut.config.published.special_names import ADDED_TOKENS, special_names
from crosscut.config.published.tokenizer_classes import PLAIN, Difference, TokenizerClass, dicts
from crosscut.config.system.files import json_or_none, read_json

_KEYS = {
    "lowercase": "do_lower_case",
    "strip_accents": "strip_accents",
    "handle_chinese_chars": "tokenize_chinese_chars",
    "add_prefix_space": "add_prefix_space",
    "prepend_scheme": "add_prefix_space",
}
"""Keys of `tokenizer_config.json` by the value of a step that they change."""
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized")
"""Flags of a token that decide where it is found in a text."""
_FIX, _MOST_UNFIXED = "fix_mistral_regex", 100_000
"""Key for the words of Mistral's tokenizers, and the size of a vocabulary up to which it has no effect."""
_MOST_NAMED = 5
_MOST_LETTERS = 80


def check_tokenizer(folder: Path) -> list[str]:
    """Check the files beside the `tokenizer.json` in `folder`. Raises `ConfigError` for settings with which
    `transformers` would give a text other tokens. Returns lines for the user about unknown keys, about a class of
    `transformers` that may give other tokens, and about tokens that differ in the files.
    """
    config, special, model = (folder / name for name in (TOKENIZER_CONFIG_FILE, SPECIAL_TOKENS_FILE, MODEL_FILE))
    tables = {path: read_json(path) if path.is_file() else {} for path in (config, special, model)}
    notices = []
    for path, keys in ((config, TOKENIZER), (special, SPECIAL_TOKENS)):
        of_template = {key for key in tables[path] if key.endswith("_token")} - {*keys.known()}
        notices.append(keys.check({key: value for key, value in tables[path].items() if key not in of_template}, path))
    inner = json_or_none(folder / TOKENIZER_FILE)
    if isinstance(inner, dict):
        kind = TokenizerClass.of(tables[config], tables[model], inner)
        notices += [
            _about_class(kind, tables[config], inner, folder),
            _about_mistral(tables[config], inner, config),
            _about_missing(kind, tables[config], inner, folder),
            _about_flags(tables[config], inner, config),
        ]
    return [notice for notice in notices if notice]


def _about_class(kind: TokenizerClass, settings: Mapping[str, Any], inner: Mapping[str, Any], folder: Path) -> str:
    """Compare the steps of a class with those of `tokenizer.json`. Returns a line if they may differ."""
    path, config = folder / TOKENIZER_FILE, folder / TOKENIZER_CONFIG_FILE
    if not kind.is_known:
        return (
            f"Crosscut does not know the `tokenizer_class` {shown(kind.name)} of `{config}`, and tokenizes as `{path}` "
            "says. `transformers` may give texts other tokens."
        )
    found = kind.difference(settings, inner)
    if kind.tokens and (lacking := unfit(kind, found, inner, folder)):
        if kind.is_given:
            raise ConfigError(
                f"`tokenizer_class` in `{config}` must fit `{path.name}`, which has no {lacking}, but is "
                f"{shown(kind.name)}. Save the tokenizer again with transformers."
            )
    elif found and (kind.tokens or _is_said(found, settings)):
        raise _contradiction(kind, found, settings, folder)
    return kind.notice(settings, inner, path)


def _about_mistral(settings: Mapping[str, Any], inner: Mapping[str, Any], config: Path) -> str:
    """Line about a key with which `transformers` splits the words of a large tokenizer in another way."""
    model = inner.get("model")
    if settings.get(_FIX) is not True or not isinstance(model, dict) or len(model.get("vocab") or ()) <= _MOST_UNFIXED:
        return ""
    return f"`{_FIX}` in `{config}` is true, so `transformers` may give texts other tokens than `{TOKENIZER_FILE}`."


def unfit(kind: TokenizerClass, found: Difference | None, inner: Mapping[str, Any], folder: Path) -> str:
    """Name what `tokenizer.json` lacks of an encoder's class: the kind of vocabulary, or a token around texts."""
    if found and found.part == "model" and not found.name:
        return f"vocabulary of the kind {found.wanted}"
    model = inner.get("model")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    known = {*(vocabulary if isinstance(vocabulary, dict) else ()), *_added(inner)}
    names = special_names(folder)
    tokens = [names.get(name) or kind.tokens[name] for name in ("cls_token", "sep_token")]
    return " and ".join(f"token {shown(token)}" for token in tokens if token not in known)


def _is_said(found: Difference, settings: Mapping[str, Any]) -> bool:
    """Whether a key of the settings says the opposite of `tokenizer.json`. Llama's `legacy` does not count."""
    is_other = found.name != "prepend_scheme" or "never" in (found.found, found.wanted)
    return is_other and settings.get(_KEYS.get(found.name, "")) is not None


def _contradiction(kind: TokenizerClass, found: Difference, settings: Mapping[str, Any], folder: Path) -> ConfigError:
    """Error for settings that contradict `tokenizer.json`."""
    path, config = folder / TOKENIZER_FILE, folder / TOKENIZER_CONFIG_FILE
    if (key := _KEYS.get(found.name)) is None:
        place = f"`{found.name}` of `{found.part}`" if found.name else f"`{found.part}`"
        return ConfigError(
            f"{place} in `{path}` must be {json_shown(found.wanted)}, but is {json_shown(found.found)}. "
            f"`transformers` reads the file with {kind.name}, which would give texts other tokens. If the file is "
            f'right, write `"tokenizer_class": "{PLAIN}"` into `{config}`.'
        )
    wanted = found.found != "never" if found.name == "prepend_scheme" else found.found
    told = f"`{key}` in `{config}` must be {json_shown(wanted)} as in `{TOKENIZER_FILE}`, but is"
    if key in settings:
        return ConfigError(f"{told} {json_shown(settings[key])}. Correct the file that is wrong.")
    return ConfigError(
        f"{told} missing, which means {json_shown(found.wanted)} for {kind.name} of `transformers`. Write "
        f'`"{key}": {json_shown(wanted)}` into the file.'
    )


def _added(inner: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Tokens that `tokenizer.json` finds in a text before its steps, by their text."""
    return {str(token.get("content")): token for token in dicts(inner.get("added_tokens"))}


def _of_settings(settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Tokens that `tokenizer_config.json` adds."""
    added = settings.get(ADDED_TOKENS)
    return dicts([*added.values()]) if isinstance(added, dict) else []


def _about_missing(kind: TokenizerClass, settings: Mapping[str, Any], inner: Mapping[str, Any], folder: Path) -> str:
    """Line about tokens that `tokenizer.json` does not find in a text. Empty if there are none."""
    names, known = special_names(folder), _added(inner)
    of_class = [token for name, token in kind.tokens.items() if not names.get(name)]
    named = dict.fromkeys((*names.contents, *of_class, *(str(each.get("content")) for each in _of_settings(settings))))
    if not (missing := [token for token in named if token not in known]):
        return ""
    return (
        f"`{folder / TOKENIZER_FILE}` lacks {len(missing)} of the special tokens that the files beside it name "
        f"({_listed(missing)}). Crosscut reads them as ordinary text."
    )


def _about_flags(settings: Mapping[str, Any], inner: Mapping[str, Any], config: Path) -> str:
    """Line about tokens that the files describe in different ways. Empty if there are none."""
    known, differing = _added(inner), []
    for token in _of_settings(settings):
        theirs = known.get(content := str(token.get("content")), {})
        if any(token[flag] != theirs[flag] for flag in _FLAGS if flag in token and flag in theirs):
            differing.append(content)
    if not differing:
        return ""
    return (
        f"`{ADDED_TOKENS}` in `{config}` describes {len(differing)} of the tokens in `{TOKENIZER_FILE}` in another way "
        f"({_listed(differing)}). Crosscut reads them as `{TOKENIZER_FILE}` says."
    )


def _listed(tokens: list[str]) -> str:
    return ", ".join(json_shown(token[:_MOST_LETTERS]) for token in tokens[:_MOST_NAMED])
