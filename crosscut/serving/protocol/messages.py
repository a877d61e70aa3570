"""Messages of a chat request."""

from crosscut.serving.protocol.fields import Fields, is_text
from crosscut.serving.protocol.unsupported import MESSAGE_ONLY_AS, NO_TOOLS, TEXT_ONLY

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
"""Accepted roles, each with the name that chat templates use for it."""


def read_messages(fields: Fields) -> list[dict[str, str]]:
    """Read the messages of a chat and convert their roles to the names that chat templates use. Raises `Refusal`."""
    value = fields.get("messages")
    if not isinstance(value, list) or not value:
        fields.refuse("messages", "be a list of at least one message")
    return [_message(one, f"messages[{number}]") for number, one in enumerate(value)]


def _message(value: object, place: str) -> dict[str, str]:
    fields = Fields(value, place)
    role = fields.text("role")
    if role not in _ROLES:
        do = NO_TOOLS if role in ("tool", "function") else ""
        fields.refuse("role", "be system, developer, user or assistant", do)
    message = {"role": _ROLES[role], "content": _content(fields)}
    if (name := fields.text("name")) is not None:
        message["name"] = name
    for key, (harmless, reason) in MESSAGE_ONLY_AS.items():
        fields.only(key, harmless, reason)
    fields.finish()
    return message


def _content(fields: Fields) -> str:
    """Text of a message, which may consist of several parts."""
    value = fields.get("content")
    if is_text(value):
        return value
    if not isinstance(value, list) or not value:
        fields.refuse("content", "be a string or a list of parts")
    parts = [Fields(part, f"{fields.path('content')}[{number}]") for number, part in enumerate(value)]
    texts = []
    for part in parts:
        if part.text("type") != "text":
            part.refuse("type", 'be "text"', TEXT_ONLY)
        if (text := part.text("text")) is None:
            part.refuse("text", "be a string")
        part.finish()
        texts.append(text)
    return "".join(texts)
