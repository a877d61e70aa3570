"""Read conversations from .jsonl files in OpenAI's format: each line is an object with `messages`.

A message has a `role` (system, user or assistant) and a `content`. The loss covers the messages of the assistant. The
model also reads an answer with `"weight": 0`, but the loss leaves this answer out.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from crosscut.config import DataError
from crosscut.config.system.files import read_lines
from crosscut.data.text.json_text import parse_record
from crosscut.serving.protocol.fields import Fields, shown
from crosscut.serving.protocol.messages import read_messages
from crosscut.serving.protocol.refusals import Refusal

ANSWER = "assistant"
"""Role of the messages that the model learns to write."""


@dataclass(frozen=True)
class Conversation:
    """Messages of one conversation."""

    place: str
    """File and line of the conversation, such as `chats.jsonl:3`, for error messages."""
    messages: tuple[Mapping[str, str], ...]
    """Messages with the keys `role` and `content`, and perhaps `name`."""
    answers: tuple[int, ...]
    """Indices of the messages that the loss covers. There is at least one."""


def read_conversations(files: Iterable[str | Path]) -> list[Conversation]:
    """Read the conversations of several files, in order. Blank lines are skipped.

    Raises `DataError` if a record is not a conversation with an answer. The message gives the record's file and line.
    Also raises `DataError` if there is no conversation.
    """
    names = list(files)
    found = [conversation for name in names for conversation in _in_file(Path(name))]
    if not found:
        told = ", ".join(f"`{name}`" for name in names)
        raise DataError(f"{told} must hold at least one conversation, but holds none. Use a .jsonl file with messages.")
    return found


def _in_file(path: Path) -> Iterator[Conversation]:
    try:
        lines = list(read_lines(path))
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise DataError(f"`{path}` must be a readable .jsonl file, but is not: {reason}. Check the path.") from None
    for number, line in enumerate(lines, 1):
        if line.strip():
            yield _conversation(line, f"{path}:{number}")


def _conversation(line: str, place: str) -> Conversation:
    try:
        record = parse_record(line)
        if not isinstance(record, Mapping):
            raise DataError(f"{place}: The line must be a JSON object, but is {shown(record)}. Write an object.")
        messages, weights = _without_weights(record)
        read = read_messages(Fields({"messages": messages}))
    except ValueError as error:
        raise DataError(f"{place}: The line must be a JSON object, but cannot be read: {error}.") from None
    except Refusal as error:
        raise DataError(f"{place}: {error.message}") from None
    answers = [i for i, message in enumerate(read) if message["role"] == ANSWER and weights[i]]
    if not answers:
        raise DataError(
            f"{place}: `messages` must have at least one message with the role {ANSWER} that the loss covers, but has "
            "none. Add an answer, or remove the line."
        )
    if answers[0] == 0:
        raise DataError(
            f"{place}: `messages[0]` must be a message that the model answers, but is an answer. Add the question."
        )
    return Conversation(place, tuple(read), tuple(answers))


def _without_weights(record: Mapping[str, object]) -> tuple[object, list[bool]]:
    """Return the messages of a record without OpenAI's `weight`, and whether each message has a weight other than 0.
    Raises `Refusal` for an invalid weight.
    """
    messages = record.get("messages")
    if not isinstance(messages, list) or not all(isinstance(message, Mapping) for message in messages):
        return messages, []  # the reader of messages says what is wrong
    weights = [Fields(message, f"messages[{i}]").integer("weight", 0, 1) for i, message in enumerate(messages)]
    bare = [{key: value for key, value in message.items() if key != "weight"} for message in messages]
    return bare, [weight != 0 for weight in weights]
