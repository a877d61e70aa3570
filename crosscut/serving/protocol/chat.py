"""Conversion of chat messages to tokens. The chat template from the model's folder gives the messages the form that the
model was tuned on.

The template is a Jinja program that comes with the model. It runs in a sandbox in a process of its own (`rendering`),
with the same settings and names as in `transformers`. A message must not contain the model's special tokens. Such a
token would end the message, and the author of the message could then imitate another role.
"""

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path

from crosscut.config import ConfigError
from crosscut.config.checks import MOST
from crosscut.config.published.special_names import special_names
from crosscut.config.system.files import read_small
from crosscut.data.tokenization.inner import read_inner, splits_special_tokens
from crosscut.data.tokenization.long_texts import LongText, encode_long
from crosscut.data.tokenization.token_bytes import TokenBytes
from crosscut.serving.protocol.fields import is_text, shown
from crosscut.serving.protocol.refusals import Refusal, require_bytes
from crosscut.serving.templates.program import JinjaLimits
from crosscut.serving.templates.rendering import Renderer, RenderingError

TEMPLATE = "chat_template.jinja"
SETTINGS = ("tokenizer_config.json", "special_tokens_map.json")

_LONGEST_TOKEN = 1000
"""Maximum number of characters of a special token that has a name, such as `bos_token`. The length is limited because a
template may repeat the token in every message.
"""

_LONGEST_TEMPLATE = 1 << 20
"""Maximum number of characters of a template. Published templates have up to 20,000."""

_TRIAL = ({"role": "user", "content": "Hello"},)
"""Chat that every template must render within the limits."""


class ChatTemplate:
    """Chat template from a model's folder, with the model's tokenizer.

    `names` maps the names that the template may use, such as `bos_token`, to special tokens. `place` names the
    template's file in errors. Raises `ConfigError` if the template is invalid, or if it exceeds the `limits` even for a
    short chat.
    """

    def __init__(
        self, source: str, tokenizer: Path, names: Mapping[str, str], *, place: str, limits: JinjaLimits | None = None
    ) -> None:
        if len(source) > _LONGEST_TEMPLATE:
            raise ConfigError(
                f"`{place}` must hold a chat template of at most {_LONGEST_TEMPLATE:,} characters, but has "
                f"{len(source):,}. Shorten the template, or remove it to serve completions only."
            )
        self.source = source
        self._names = {"tools": None, "documents": None, "add_generation_prompt": True, **names}
        self._renderer = Renderer(source, self._names | {"messages": _TRIAL}, place=place, limits=limits)
        self._tokenizer = read_inner(tokenizer)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = splits_special_tokens(tokenizer)
        added = self._tokenizer.get_added_tokens_decoder()
        self.special = {number: token.content for number, token in added.items() if token.special}
        """Special tokens, keyed by id."""

    @classmethod
    def find(cls, tokenizer: Path) -> "ChatTemplate | None":
        """Find the template beside a `tokenizer.json`: in `chat_template.jinja` or, if this file does not exist, in
        `tokenizer_config.json`.

        Returns None if there is no template. Raises `ConfigError` if the template cannot be read.
        """
        tables = _tables(tokenizer.parent)
        if (found := _find(tokenizer.parent, tables)) is None:
            return None
        return cls(found[1], tokenizer, _names(tokenizer.parent), place=str(found[0]))

    @staticmethod
    def is_beside(tokenizer: Path) -> bool:
        """Whether there is a template beside a `tokenizer.json`. Raises `ConfigError` if a file cannot be read."""
        return _find(tokenizer.parent, _tables(tokenizer.parent)) is not None

    def tokens(self, messages: Sequence[Mapping[str, str]], *, most_tokens: int = MOST) -> list[int]:
        """Render the messages as the prompt for the model's answer, and return the prompt's token ids (at least one).

        Raises `Refusal` as `render` does, if the template renders an empty text, and if the rendered text is too long
        for `most_tokens` tokens (`require_bytes`).
        """
        text = self.render(messages, add_generation_prompt=True)
        require_bytes(text, "messages", most_tokens, self.longest)
        ids: list[int] = self.encode(text).ids.tolist()
        return ids

    @cached_property
    def longest(self) -> int:
        """Number of bytes of the longest token."""
        return TokenBytes(self._tokenizer).longest

    def render(self, messages: Sequence[Mapping[str, str]], **names: object) -> str:
        """Render messages with the template. `names` are further variables of the template, such as
        `add_generation_prompt` (false by default). If `generation_mark` is given, its text is written at both ends of
        each passage that the template marks with `{% generation %}`.

        Raises `Refusal` for messages that the template rejects, and for messages that contain a special token.
        """
        for number, message in enumerate(messages):
            for field, text in message.items():
                self._check(text, f"messages[{number}].{field}")
        try:
            return self._renderer.render(self._names | {"messages": messages, "add_generation_prompt": False} | names)
        except RenderingError as error:
            what = f"the template cannot render them: {error}" if error.is_limit else f"the template says: {error}"
            raise Refusal(f"`messages` must suit the model's chat template, but {what}.", field="messages") from None

    def encode(self, text: str) -> LongText:
        """Encode a rendered text. Raises `Refusal` if the text has no tokens."""
        encoded = encode_long(self._tokenizer, text)
        if not len(encoded.ids):
            raise Refusal(
                "`messages` must suit the model's chat template, but the template renders an empty text from them. "
                "Send more text.",
                field="messages",
            )
        return encoded

    def _check(self, text: str, place: str) -> None:
        for token in self.special.values():
            if token in text:
                raise Refusal(
                    f"`{place}` must not contain the model's special token `{token}`, but does. The token would "
                    "end the message. Write the text differently.",
                    field=place,
                )


def _tables(folder: Path) -> dict[Path, dict[str, object]]:
    """Settings of the tokenizer in a folder, by file."""
    return {folder / file: _read(folder / file) for file in SETTINGS}


def _names(folder: Path) -> dict[str, str]:
    """Names that a template may use for special tokens, with the tokens."""
    found = {name: token for name, token in special_names(folder).named.items() if token.content}
    for name, (content, file) in found.items():
        if len(content) > _LONGEST_TOKEN:
            raise ConfigError(
                f"`{name}` in `{file}` must have at most {_LONGEST_TOKEN:,} characters, but has {len(content):,}. "
                f"Correct or remove `{name}`."
            )
    return {name: token.content for name, token in found.items()}


def _find(folder: Path, tables: Mapping[Path, Mapping[str, object]]) -> tuple[Path, str] | None:
    """File with the template, and the template. None if there is no template."""
    if (file := folder / TEMPLATE).is_file():
        return file, _read_text(file)
    sources = ((file, _source(table.get("chat_template"), file)) for file, table in tables.items())
    return next(((file, source) for file, source in sources if source), None)


def _source(value: object, file: Path) -> str | None:
    """Return the template in a value of `chat_template`: the value itself if it is a string, or the template named
    `default` if the value is a list of templates.
    """
    if isinstance(value, list) and all(isinstance(one, Mapping) for one in value):
        value = next((one.get("template") for one in value if one.get("name") == "default"), None)
    if value is not None and not is_text(value):
        raise ConfigError(
            f"`chat_template` in `{file}` must be a string, or a list of objects with `name` and `template`, but is "
            f"{shown(value)}. Correct `chat_template`, or remove it to serve completions only."
        )
    return value


def _read(file: Path) -> dict[str, object]:
    if not file.is_file():
        return {}
    try:
        settings = json.loads(_read_text(file))
    except (ValueError, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else error
        raise ConfigError(f"`{file}` must be valid JSON, but is not: {reason}. Correct or remove the file.") from None
    return settings if isinstance(settings, dict) else {}


def _read_text(file: Path) -> str:
    try:
        return read_small(file)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ConfigError(f"`{file}` must be a readable text file, but is not: {reason}.") from None
