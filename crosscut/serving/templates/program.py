"""Program that renders a chat template in a separate process, with limits on time, memory and output.

A template is a program that the model's author wrote. Inside the server's own process, it could loop for hours, take
all memory or crash the interpreter. `rendering` starts this file by its path, so that the process imports Jinja but no
part of Crosscut.

The first message on the standard input holds the limits and the template. Each further message holds the template's
variables for one rendering. The program answers each message on the standard output: with `{"text": ...}`, with
`{"error": ...}` for an error in the template, or with `{"limit": ...}` for a limit that was exceeded. The operating
system ends the process if an answer takes too long, because a process that loops in C could not end itself.
"""

import json
import resource
import signal
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from functools import cache, partial
from typing import IO, Any, NoReturn

import jinja2
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

_LENGTH_BYTES = 8

_MOST_SAID = 1000
"""Maximum number of characters of an error message."""


@dataclass(frozen=True, kw_only=True)
class JinjaLimits:
    """Limits on the process that renders a template."""

    seconds: float = 5.0
    """Maximum time of a rendering, in seconds."""
    memory: int = 512 << 20
    """Maximum memory of the process in bytes. Only Linux enforces this limit."""
    characters: int = 2 << 20
    """Maximum length of the rendered text. Encoding that many characters takes about a second."""


def write_message(stream: IO[bytes], message: Mapping[str, object]) -> None:
    """Write a message: the length of the content in bytes, then the content in JSON. Raises `UnicodeEncodeError` if the
    content has a string that is not valid Unicode.
    """
    content = json.dumps(message, ensure_ascii=False).encode()
    stream.write(len(content).to_bytes(_LENGTH_BYTES) + content)
    stream.flush()


def read_message(stream: IO[bytes]) -> Any:
    """Read and return the next message. Returns None if the other process has ended."""
    length = int.from_bytes(stream.read(_LENGTH_BYTES))
    content = stream.read(length)
    return json.loads(content) if length and len(content) == length else None


def main() -> None:
    """Compile the template from the server's first message, render it once for each further message, and send the
    server one answer per message. Return when the server closes the standard input.
    """
    source, limits = (first := read_message(sys.stdin.buffer))["source"], JinjaLimits(**first["limits"])
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    for kind, most in ((resource.RLIMIT_AS, limits.memory), (resource.RLIMIT_CORE, 0), (resource.RLIMIT_FSIZE, 0)):
        with suppress(ValueError, OSError):  # a system without this limit
            resource.setrlimit(kind, (most, most))
    _answer(partial(_check, source), limits)
    while (names := read_message(sys.stdin.buffer)) is not None:
        _answer(partial(_render, source, names, limits.characters), limits)


def _answer(work: Callable[[], str], limits: JinjaLimits) -> None:
    """Send the text that `work` returns, or the reason why there is none."""
    signal.setitimer(signal.ITIMER_REAL, limits.seconds)
    try:
        answer = {"text": work()}
    except _LongRenderingError:
        answer = {"limit": f"it renders more than {limits.characters:,} characters"}
    except MemoryError:
        answer = {"limit": f"it needs more than {limits.memory >> 20} MiB of memory"}
    except RecursionError:
        answer = {"error": "it is nested too deeply"}
    except jinja2.TemplateSyntaxError as error:
        answer = {"error": f"line {error.lineno} is invalid: {error.message}"}
    except Exception as error:  # a template may raise any error
        answer = {"error": str(error)[:_MOST_SAID] or type(error).__name__}
    signal.setitimer(signal.ITIMER_REAL, 0)
    try:
        write_message(sys.stdout.buffer, answer)
    except UnicodeEncodeError:
        write_message(sys.stdout.buffer, {"error": "it renders characters that are not Unicode"})


class _LongRenderingError(Exception):
    """The rendered text exceeds its limit."""


@cache
def _compiled(source: str) -> jinja2.Template:
    return _environment().from_string(source)


def _check(source: str) -> str:
    """Compile the template. Returns an empty text."""
    _compiled(source)
    return ""


def _render(source: str, names: Mapping[str, object], most_characters: int) -> str:
    parts, length = [], 0
    for part in _compiled(source).generate(**names):
        length += len(part)
        if length > most_characters:
            raise _LongRenderingError
        parts.append(part)
    return "".join(parts)


class _Generation(Extension):
    """Extension for the tag `{% generation %}`, with which some templates mark answers for training. If a rendering has
    the variable `generation_mark`, the variable's text is written at both ends of each answer. Otherwise, the tag has
    no effect.
    """

    tags = {"generation"}  # noqa: RUF012 - declared by Jinja without ClassVar

    def parse(self, parser: Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        mark = self.call_method("_between", [jinja2.nodes.Name("generation_mark", "load")])
        return jinja2.nodes.CallBlock(mark, [], [], body).set_lineno(line)

    def _between(self, mark: str | jinja2.Undefined, caller: Callable[[], str]) -> str:
        return f"{mark}{caller()}{mark}"  # an undefined name is an empty text


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


if __name__ == "__main__":
    main()
