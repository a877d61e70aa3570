"""Reading a JSON object field by field: what is wrong with one is a `Refusal` that names it.

A field that is left out and one that is null are the same, as clients send both. Whoever reads an object asks for each
field that it knows and calls `finish`, so that no field is ever ignored in silence.
"""

import difflib
import json
import math
from collections.abc import Mapping, Sequence
from typing import NoReturn, TypeGuard

from crosscut.serving.refusals import Refusal

_SHOWN = 80
"""Characters of a value that a message repeats."""


class Fields:
    """The fields of one JSON object. `place` is where it stands in the request, such as `messages[0]`."""

    def __init__(self, values: object, place: str = "") -> None:
        if not isinstance(values, Mapping):
            what = f"`{place}`" if place else "The request's body"
            raise Refusal(f"{what} must be a JSON object, but is {shown(values)}.", field=place or None)
        self._values = values
        self._place = place
        self._known: set[str] = set()

    def get(self, name: str) -> object:
        """A field as it came; None where it is left out."""
        self._known.add(name)
        return self._values.get(name)

    def path(self, name: str) -> str:
        """The field's full name."""
        return f"{self._place}.{name}" if self._place else name

    def refuse(self, name: str, must: str, do: str = "") -> NoReturn:
        """Refuse the request for this field: what it `must` be, and what to `do`."""
        path, value = self.path(name), self._values.get(name)
        what = "is missing" if value is None else f"is {shown(value)}"
        raise Refusal(f"`{path}` must {must}, but {what}.{f' {do}' if do else ''}", field=path)

    def text(self, name: str) -> str | None:
        """A text without lone surrogates, which JSON can spell and no tokenizer can read."""
        value = self.get(name)
        if value is not None and not is_text(value):
            self.refuse(name, "be a text")
        return value

    def flag(self, name: str) -> bool:
        """True or false, false where it is left out."""
        value = self.get(name)
        if value is not None and not isinstance(value, bool):
            self.refuse(name, "be true or false")
        return bool(value)

    def integer(self, name: str, lowest: int, highest: int) -> int | None:
        """A whole number within bounds."""
        value = self.get(name)
        if value is None:
            return None
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or not lowest <= value <= highest:
            self.refuse(name, f"be a whole number from {lowest} to {highest}")
        return value

    def number(self, name: str, lowest: float, highest: float) -> float | None:
        """A number within bounds."""
        value = self.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not lowest <= value <= highest:
            self.refuse(name, f"be a number from {lowest:g} to {highest:g}")
        return float(value)

    def only(self, name: str, harmless: Sequence[object], reason: str) -> None:
        """A field that is not supported: only values that ask for nothing are let through."""
        value = self.get(name)
        if value is not None and not any(_same(value, one) for one in harmless):
            spelled = " or ".join(["left out", *(shown(one) for one in harmless)])
            self.refuse(name, f"be {spelled}", reason)

    def finish(self) -> None:
        """Refuse the request where there are fields that nobody asked for."""
        for name in self._values:
            if name not in self._known:
                path = self.path(str(name))
                near = difflib.get_close_matches(str(name), self._known, 1)
                do = f"Did you mean `{self.path(near[0])}`?" if near else "Leave it out."
                raise Refusal(f"`{path}` must be a field that this server knows, but is not. {do}", field=path)


def is_text(value: object) -> TypeGuard[str]:
    """Whether this is a text that can be encoded."""
    try:
        return isinstance(value, str) and value.encode() is not None
    except UnicodeEncodeError:
        return False


def shown(value: object) -> str:
    """A value as JSON, cut where it is long."""
    text = json.dumps(value, ensure_ascii=True)
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 4]} ..."


def parse(body: bytes) -> object:
    """The JSON value that a request's body is; refuses what is none, NaN and infinities among it."""

    def refuse(constant: str) -> NoReturn:
        raise ValueError(f"{constant} is not a number in JSON")

    def finite(number: str) -> float:
        value = float(number)
        if not math.isfinite(value):
            raise ValueError(f"{number} is too large a number")
        return value

    try:
        return json.loads(body, parse_constant=refuse, parse_float=finite)
    except (ValueError, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise Refusal(f"The request's body must be JSON, but cannot be read: {reason}.") from None


def _same(one: object, other: object) -> bool:
    """Equality that tells true from 1."""
    return one == other and isinstance(one, bool) == isinstance(other, bool)
