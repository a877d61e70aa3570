"""Parse the header lines of records and of HTTP responses, which have the form `Name: value`."""

import re
from collections import defaultdict

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
    unfolded: list[list[str]] = []
    for line in text.split("\n"):
        if unfolded and line[:1] in (" ", "\t"):
            unfolded[-1].append(line)
        else:
            unfolded.append([line])
    first, *lines = (" ".join(map(str.strip, pieces)).strip() if pieces[1:] else pieces[0] for pieces in unfolded)
    found = defaultdict(list)
    for line in lines:
        name, colon, value = line.partition(":")
        if colon and (name := name.strip().lower()):
            found[name].append(value.strip())
    return first.rstrip("\r"), {name: ", ".join(values) for name, values in found.items()}


def media_type(value: str) -> tuple[str, str]:
    """Split the value of a `Content-Type` header into the media type and the charset. Both may be empty."""
    kind = re.split("[;,]", value, maxsplit=1)[0].strip().lower()
    charset = _CHARSET.search(value)
    return kind, charset[1] if charset else ""
