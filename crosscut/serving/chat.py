"""Conversion of chat messages to the tokens that the model was tuned on, with the chat template from the model's
folder.

The template is a Jinja program that comes with the model. It runs in a sandbox, with the same settings and names as in
`transformers`. A message must not contain the model's special tokens. Such a token would end the message, and the
author of the message could then imitate another role.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import tokenizers
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from crosscut.config import ConfigError
from crosscut.serving.refusals import Refusal

TEMPLATE = "chat_template.jinja"
SETTINGS = ("tokenizer_config.json", "special_tokens_map.json")

_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class ChatTemplate:
    """Chat template from a model's folder, with the tokenizer that encodes its special tokens."""

    def __init__(self, source: str, tokenizer: Path, names: Mapping[str, str], *, place: str) -> None:
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ConfigError(
                f"`{place}` must hold a chat template in Jinja, but line {error.lineno} is invalid: {error.message}. "
                "Correct the template, or remove it to serve completions only."
            ) from None
        self._names = dict(names)
        self._tokenizer = tokenizers.Tokenizer.from_file(str(tokenizer))
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._special = [
            token.content for token in self._tokenizer.get_added_tokens_decoder().values() if token.special
        ]

    @classmethod
    def find(cls, tokenizer: Path) -> "ChatTemplate | None":
        """Find the template beside a `tokenizer.json`: in `chat_template.jinja` or, if this file does not exist, in
        `tokenizer_config.json`.

        Returns None if there is no template. Raises `ConfigError` if the template cannot be read.
        """
        folder = tokenizer.parent
        settings = {name: value for file in reversed(SETTINGS) for name, value in _read(folder / file).items()}
        names = {name: _content(settings[name]) for name in _NAMED_TOKENS if settings.get(name)}
        if (file := folder / TEMPLATE).is_file():
            return cls(file.read_text(encoding="utf-8"), tokenizer, names, place=str(file))
        source = settings.get("chat_template")
        if isinstance(source, list):  # several templates with names
            source = next((one["template"] for one in source if one.get("name") == "default"), None)
        return None if not source else cls(source, tokenizer, names, place=str(folder / SETTINGS[0]))

    def tokens(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Encode the prompt that requests an answer to the messages. Raises `Refusal` for messages that the template
        rejects.
        """
        for number, message in enumerate(messages):
            for field, text in message.items():
                self._check(text, f"messages[{number}].{field}")
        try:
            prompt = self._template.render(
                messages=messages, tools=None, documents=None, add_generation_prompt=True, **self._names
            )
        except Exception as error:  # the template is a program of the model's author and may raise any error
            raise Refusal(
                f"`messages` must suit the model's chat template, but the template says: {error}.", field="messages"
            ) from None
        return list(self._tokenizer.encode(prompt, add_special_tokens=False).ids)

    def _check(self, text: str, place: str) -> None:
        for token in self._special:
            if token in text:
                raise Refusal(
                    f"`{place}` must not contain the model's special token `{token}`, which would end the message, but "
                    "does. Write it differently.",
                    field=place,
                )


class _Generation(Extension):
    """Extension that accepts the tag `{% generation %}`, with which some templates mark answers for training. The tag
    has no effect here.
    """

    tags = {"generation"}  # noqa: RUF012 - declared by Jinja without ClassVar

    def parse(self, parser: Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    """Jinja environment with the same settings as in `transformers`."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def _to_json(value: object, indent: int | None = None, **options: Any) -> str:
    """Convert a value to JSON. Jinja's own filter would escape HTML characters."""
    return json.dumps(value, ensure_ascii=False, indent=indent, **options)


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _content(token: str | Mapping[str, Any]) -> str:
    """Text of a special token, which the file gives as a string or as an object with a `content`."""
    return token if isinstance(token, str) else str(token["content"])


def _read(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        settings = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"`{file}` must be valid JSON, but is not: {error}. Correct it or remove it.") from None
    return settings if isinstance(settings, dict) else {}
