"""Parse the header lines of records and of HTTP responses, which have the form `Name: value`."""

import re

BLANK_LINE = re.compile(rb"(?<!\r)\r*+\n\r*+\n")
"""Pattern for the end of a header block. It also matches line ends that were converted twice. A run of carriage returns
is matched only from its start. Otherwise, the time of a search would grow with the square of the run's length."""

_CHARSET = re.compile(r"charset\s*=\s*[\"']?([^\s\"';,]+)", re.IGNORECASE)


def split_head(block: bytes) -> tuple[str, dict[str, str]]:
    """Return the first line of a header block, and the values of the other lines, keyed by name in lower case.

    The values of a name that occurs several times are joined with commas. Lines without a colon are ignored, and a line
    that begins with white space continues the previous line.
    """
    try:
        text = block.decode("utf-8")
    except UnicodeDecodeError:
        text = block.decode("latin-1")
    lines = text.split("\n")
    if "\n " in text or "\n\t" in text:
        lines = _unfolded(lines)
    found: dict[str, str] = {}
    repeated: dict[str, list[str]] = {}
    for line in lines[1:]:
        name, colon, value = line.partition(":")
        name = name.strip().lower() if colon else ""
        if name in found:
            repeated.setdefault(name, [found[name]]).append(value.strip())
        elif name:
            found[name] = value.strip()
    found.update((name, ", ".join(values)) for name, values in repeated.items())
    return lines[0].rstrip("\r"), found


def _unfolded(lines: list[str]) -> list[str]:
    """Join each line that begins with white space with the line before it."""
    pieces: list[list[str]] = []
    for line in lines:
        if pieces and line[:1] in (" ", "\t"):
            pieces[-1].append(line)
        else:
            pieces.append([line])
    return [" ".join(map(str.strip, several)).strip() for several in pieces]


def media_type(value: str) -> tuple[str, str]:
    """Split the value of a `Content-Type` header into the media type and the charset. Both may be empty."""
    kind = re.split("[;,]", value, maxsplit=1)[0].strip().lower()
    charset = _CHARSET.search(value)
    return kind, charset[1] if charset else ""
