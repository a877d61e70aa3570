"""Line numbers of the keys in a TOML file. Python's TOML parser does not report line numbers."""

import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

from crosscut.config.system.files import parse_toml

_PART = re.compile(
    r'''"""(?:\\.|[^\\])*?"{3,5}'''  # strings first: brackets and # have no meaning inside a string
    r"""|'''.*?'{3,5}"""
    r"""|"(?:\\.|[^"\\\n])*"|'[^'\n]*'|\#[^\n]*"""
    r"""|[\[\]{}=\n]|[^\[\]{}="'\#\n]+""",
    re.DOTALL,
)
_DEPTHS = {"[": 1, "{": 1, "]": -1, "}": -1}


def key_lines(text: str) -> dict[str, int]:
    """Line number, counted from 1, of each section and each key in a valid TOML file, keyed by dotted name.

    The items of an array of tables are numbered from 0, as in `sources.0.name`. The keys of an inline table are left
    out.
    """
    lines: dict[str, int] = {}
    items: Counter[str] = Counter()
    section = ""
    for number, head in _heads(text):
        if not head.startswith("["):
            lines[f"{section}{_dotted(parse_toml(f'{head} = 0'))}"] = number
            continue
        name = _dotted(parse_toml(head))
        if head.startswith("[["):
            items[name] += 1
            name = f"{name}.{items[name] - 1}"
        lines[name] = number
        section = f"{name}."
    return lines


def _heads(text: str) -> Iterator[tuple[int, str]]:
    """Line number and text of each section header, and of each key up to the equals sign."""
    number, depth, head, in_value = 1, 0, "", False
    for part in _PART.findall(f"{text}\n"):
        depth += _DEPTHS.get(part, 0)
        if part == "\n" and not depth:
            if head.strip() and not in_value:  # a section header
                yield number, head.strip()
            head, in_value = "", False
        elif part == "=" and not in_value:
            yield number, head.strip()
            in_value = True
        elif not in_value and not part.startswith("#"):
            head += part
        number += part.count("\n")


def _dotted(table: dict[str, Any]) -> str:
    """Dotted name of the only key in nested tables."""
    name, value = next(iter(table.items()))
    inner = value[0] if isinstance(value, list) else value
    return f"{name}.{_dotted(inner)}" if isinstance(inner, dict) and inner else name
