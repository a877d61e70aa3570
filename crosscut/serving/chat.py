"""From the messages of a chat to the tokens that a model was tuned on, by the model folder's own template.

The template is a Jinja program that comes with the model, so it runs in a sandbox, with the settings and names that
`transformers` gives it. A message must not hold the model's special tokens: the text would end the message that it
stands in, and let whoever wrote it speak as somebody else.
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
    """A model folder's chat template with the tokenizer that reads its special tokens."""

    def __init__(self, source: str, tokenizer: Path, names: Mapping[str, str], *, place: str) -> None:
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ConfigError(
                f"`{place}` must hold a chat template in Jinja, but line {error.lineno} is not: {error.message}. "
                "Mend it, or take it away to serve completions only."
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
        """The template beside a `tokenizer.json`: `chat_template.jinja`, else the one in `tokenizer_config.json`.

        None where there is none. Raises `ConfigError` where it cannot be read.
        """
        folder = tokenizer.parent
        settings = {name: value for file in reversed(SETTINGS) for name, value in _read(folder / file).items()}
        names = {name: _content(settings[name]) for name in _NAMED_TOKENS if settings.get(name)}
        if (file := folder / TEMPLATE).is_file():
            return cls(file.read_text(encoding="utf-8"), tokenizer, names, place=str(file))
        source = settings.get("chat_template")
        if isinstance(source, list):  # several, by name
            source = next((one["template"] for one in source if one.get("name") == "default"), None)
        return None if not source else cls(source, tokenizer, names, place=str(folder / SETTINGS[0]))

    def tokens(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """The prompt that asks for an answer to the messages. Raises `Refusal` for what the template does not take."""
        for number, message in enumerate(messages):
            for field, text in message.items():
                self._check(text, f"messages[{number}].{field}")
        try:
            prompt = self._template.render(
                messages=messages, tools=None, documents=None, add_generation_prompt=True, **self._names
            )
        except Exception as error:  # the template is a program of the model's, and may raise anything
            raise Refusal(
                f"`messages` must be what the model's chat template takes, but it says: {error}.", field="messages"
            ) from None
        return list(self._tokenizer.encode(prompt, add_special_tokens=False).ids)

    def _check(self, text: str, place: str) -> None:
        for token in self._special:
            if token in text:
                raise Refusal(
                    f"`{place}` must not hold the model's special token `{token}`, which would end the message, but "
                    "does. Write it otherwise.",
                    field=place,
                )


class _Generation(Extension):
    """Takes the marks `{% generation %}` that some templates put around answers, for training; here they do nothing."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's own declaration

    def parse(self, parser: Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    """Jinja as `transformers` sets it up for chat templates."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def _to_json(value: object, indent: int | None = None, **options: Any) -> str:
    """As JSON; Jinja's own filter would escape it for HTML."""
    return json.dumps(value, ensure_ascii=False, indent=indent, **options)


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _content(token: str | Mapping[str, Any]) -> str:
    """A special token is spelled as a text or as an object that describes it."""
    return token if isinstance(token, str) else str(token["content"])


def _read(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        settings = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"`{file}` must be JSON, but is not: {error}. Mend it or take it away.") from None
    return settings if isinstance(settings, dict) else {}
