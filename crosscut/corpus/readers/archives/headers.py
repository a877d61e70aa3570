"""Parse the header lines of records and of HTTP responses, which have the form `Name: value`."""

import re

BLANK_LINE = re.compile(rb"\r*\n\r*\n")
"""Pattern for the end of a header block. It also matches line ends that were converted twice."""

_LINE_END = re.compile(r"\r*\n")
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
    first, *lines = _LINE_END.split(text)
    found: dict[str, str] = {}
    name = ""
    for line in lines:
        if line[:1] in (" ", "\t"):
            if name:
                found[name] = f"{found[name]} {line.strip()}".strip()
            continue
        name, colon, value = line.partition(":")
        name = name.strip().lower() if colon else ""
        if name:
            found[name] = f"{found[name]}, {value.strip()}" if name in found else value.strip()
    return first, found


def media_type(value: str) -> tuple[str, str]:
    """Split the value of a `Content-Type` header into the media type and the charset. Both may be empty."""
    kind = re.split("[;,]", value, maxsplit=1)[0].strip().lower()
    charset = _CHARSET.search(value)
    return kind, charset[1] if charset else ""
