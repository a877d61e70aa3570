"""Check of the files beside a published `tokenizer.json`.

Crosscut tokenizes as `tokenizer.json` says. The classes of `transformers` change such a tokenizer by some keys of
`tokenizer_config.json`, so these keys are compared with `tokenizer.json`.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from crosscut.config.published.folders import SPECIAL_TOKENS_FILE, TOKENIZER_CONFIG_FILE, TOKENIZER_FILE
from crosscut.config.published.keys import SPECIAL_TOKENS, TOKENIZER
from crosscut.config.published.keys.form import json_shown, refusal
from crosscut.config.system.files import json_or_none, read_json

_BERT_KEYS = {
    "do_lower_case": "lowercase",
    "strip_accents": "strip_accents",
    "tokenize_chinese_chars": "handle_chinese_chars",
}
"""Keys for BERT's normaliser, with its settings in `tokenizer.json`."""
_PLAIN_CLASSES = ("PreTrainedTokenizerFast", "TokenizersBackend")
"""Classes of `transformers` that tokenize as `tokenizer.json` says."""


def check_tokenizer(folder: Path) -> list[str]:
    """Check the files beside the `tokenizer.json` in `folder`. Raises `ConfigError` for a key of
    `tokenizer_config.json` with which `transformers` would give a text other tokens. Returns lines for the user about
    unknown keys, and about tokens that `tokenizer.json` does not have.
    """
    config, special = folder / TOKENIZER_CONFIG_FILE, folder / SPECIAL_TOKENS_FILE
    notices: list[str] = []
    named: dict[str, None] = {}
    for path, keys in ((config, TOKENIZER), (special, SPECIAL_TOKENS)):
        if path.is_file():
            table = read_json(path)
            of_template = {key for key in table if key.endswith("_token")} - {*keys.known()}
            notices.append(keys.check({key: value for key, value in table.items() if key not in of_template}, path))
            named |= dict.fromkeys(_contents(table))
    inner = json_or_none(folder / TOKENIZER_FILE)
    if not isinstance(inner, dict):
        return [notice for notice in notices if notice]
    if config.is_file():
        _require_same_steps(read_json(config), config, inner)
    known = {each.get("content") for each in _dicts(inner.get("added_tokens"))}
    if missing := [token for token in named if token not in known]:
        names = ", ".join(json_shown(token[:80]) for token in missing[:5])
        notices.append(
            f"`{folder / TOKENIZER_FILE}` lacks {len(missing)} of the special tokens that the files beside it name "
            f"({names}). Crosscut reads them as ordinary text."
        )
    return [notice for notice in notices if notice]


def _require_same_steps(table: Mapping[str, Any], path: Path, inner: Mapping[str, Any]) -> None:
    """Raise `ConfigError` if `tokenizer_config.json` contradicts the steps of `tokenizer.json`."""
    if table.get("tokenizer_class") in _PLAIN_CLASSES:
        return
    steps = [*_steps(inner.get("normalizer")), *_steps(inner.get("pre_tokenizer"))]
    for kind, keys in (("BertNormalizer", _BERT_KEYS), ("ByteLevel", {"add_prefix_space": "add_prefix_space"})):
        for step in steps:
            for key, name in keys.items() if step.get("type") == kind else ():
                if table.get(key) is not None and table[key] != step.get(name):
                    must = f"{json_shown(step.get(name))} as in `{TOKENIZER_FILE}`"
                    raise refusal(path, key, must, table[key], "Correct the file that is wrong.")


def _steps(step: object) -> Iterator[Mapping[str, Any]]:
    """Yield the steps of a normaliser or a pre-tokenizer, which may be a sequence of steps."""
    if isinstance(step, dict):
        yield step
        for inner in (*_dicts(step.get("normalizers")), *_dicts(step.get("pretokenizers"))):
            yield from _steps(inner)


def _dicts(value: object) -> list[dict[str, Any]]:
    return [each for each in value if isinstance(each, dict)] if isinstance(value, list) else []


def _contents(table: Mapping[str, Any]) -> Iterator[str]:
    """Yield the special tokens that a file names."""
    tokens = [value for key, value in table.items() if key.endswith("_token")]
    for key in ("additional_special_tokens", "extra_special_tokens"):
        more = table.get(key)
        tokens += more.values() if isinstance(more, dict) else more if isinstance(more, list) else ()
    for token in tokens:
        content = token.get("content") if isinstance(token, dict) else token
        if isinstance(content, str):
            yield content
