"""Read a JSON object field by field. An invalid field raises a `Refusal` that names the field.

A null field counts as missing, because some clients send null for unused fields. Code that uses an object reads every
field that it knows and then calls `finish`, which refuses all other fields. No field is therefore silently ignored.
"""

import difflib
import json
import math
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import NoReturn, TypeGuard

from crosscut.serving.protocol.refusals import Refusal

_SHOWN = 80
"""Maximum number of characters of a value or of a name in a message."""


class RequestKind(StrEnum):
    """Kinds of requests that use the model."""

    COMPLETION = "completion"
    CHAT = "chat"
    EMBEDDING = "embedding"


class Fields:
    """Fields of one JSON object. `place` is the object's path in the request, such as `messages[0]`."""

    def __init__(self, values: object, place: str = "") -> None:
        if not isinstance(values, Mapping):
            what = f"`{place}`" if place else "The request's body"
            raise Refusal(f"{what} must be a JSON object, but is {shown(values)}.", field=place or None)
        self._values = values
        self._place = place
        self._known: set[str] = set()

    def get(self, name: str) -> object:
        """Unchecked value of a field, or None if the field is missing."""
        self._known.add(name)
        return self._values.get(name)

    def path(self, name: str) -> str:
        """Full path of the field."""
        return f"{self._place}.{name}" if self._place else name

    def refuse(self, name: str, must: str, do: str = "") -> NoReturn:
        """Raise a `Refusal` for this field. The message says what the field `must` be, what its value is, and what the
        client can `do`.
        """
        path, value = self.path(name), self._values.get(name)
        what = "is missing" if value is None else f"is {shown(value)}"
        raise Refusal(f"`{path}` must {must}, but {what}.{f' {do}' if do else ''}", field=path)

    def text(self, name: str) -> str | None:
        """Text of a field. Lone surrogates are refused, because JSON can express them but tokenizers cannot encode
        them.
        """
        value = self.get(name)
        if value is not None and not is_text(value):
            self.refuse(name, "be a string")
        return value

    def flag(self, name: str) -> bool:
        """Boolean value of a field. False if the field is missing."""
        value = self.get(name)
        if value is not None and not isinstance(value, bool):
            self.refuse(name, "be true or false")
        return bool(value)

    def integer(self, name: str, lowest: int, highest: int) -> int | None:
        """Integer value of a field, within bounds."""
        value = self.get(name)
        if value is None:
            return None
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or not lowest <= value <= highest:
            self.refuse(name, f"be a whole number from {lowest} to {highest}")
        return value

    def number(self, name: str, lowest: float, highest: float) -> float | None:
        """Numeric value of a field, within bounds."""
        value = self.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not lowest <= value <= highest:
            self.refuse(name, f"be a number from {lowest:g} to {highest:g}")
        return float(value)

    def only(self, name: str, harmless: Sequence[object], reason: str) -> None:
        """Refuse an unsupported field unless its value is in `harmless`, the values that have no effect."""
        value = self.get(name)
        if value is not None and not any(_same(value, one) for one in harmless):
            spelled = " or ".join(["omitted", *(shown(one) for one in harmless)])
            self.refuse(name, f"be {spelled}", reason)

    def finish(self) -> None:
        """Raise a `Refusal` if the object has fields that have not been read."""
        for name in self._values:
            if name not in self._known:
                path = self.path(_shortened(name))
                near = difflib.get_close_matches(name[:_SHOWN], self._known, 1)
                do = f"Did you mean `{self.path(near[0])}`?" if near else "Remove this field."
                raise Refusal(f"`{path}` must be a known field, but is not. {do}", field=path)


def is_text(value: object) -> TypeGuard[str]:
    """Whether a value is a string that can be encoded in UTF-8."""
    try:
        return isinstance(value, str) and value.encode() is not None
    except UnicodeEncodeError:
        return False


def shown(value: object) -> str:
    """Format a value as JSON, shortened if the JSON is long. Only the beginning of a long or nested value is
    encoded.
    """
    text = ""
    for part in json.JSONEncoder().iterencode(value):
        text += part
        if len(text) > _SHOWN:
            break
    return _shortened(text)


def _shortened(text: str) -> str:
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 4]} ..."


def parse(body: bytes) -> object:
    """Parse a request's body as JSON. Raises `Refusal` for invalid JSON, including NaN and infinity."""

    def refuse(constant: str) -> NoReturn:
        raise ValueError(f"{constant} is not a JSON number")

    def finite(number: str) -> float:
        value = float(number)
        if not math.isfinite(value):
            raise ValueError(f"the number {number} is too large")
        return value

    try:
        return json.loads(body, parse_constant=refuse, parse_float=finite)
    except (ValueError, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise Refusal(f"The request's body must be JSON, but cannot be read: {reason}.") from None


def _same(one: object, other: object) -> bool:
    """Whether two JSON values are equal. Unlike in Python, true does not equal 1."""
    return one == other and isinstance(one, bool) == isinstance(other, bool)
