"""Parse JSON records from untrusted files. Every fault raises the same exception, with a short reason for messages."""

import json
import sys

_STRICT = json.JSONDecoder()
_LENIENT = json.JSONDecoder(strict=False)
_SPACES = " \t\n\r"


def parse_record(text: str, *, control_characters: bool = False) -> object:
    """Parse one record of a file, such as a line of a .jsonl file. `control_characters` accepts unescaped control
    characters in strings.

    Raises `ValueError`, with the reason in a few words, for text that is not JSON, for values that are nested too
    deeply for the parser, and for an integer with thousands of digits, which Python does not convert.
    """
    decoder = _LENIENT if control_characters else _STRICT
    try:  # `decode` would take three times as long for a short record
        value, end = decoder.raw_decode(text, len(text) - len(text.lstrip(_SPACES)))
        return value if end == len(text) or not text[end:].strip(_SPACES) else decoder.decode(text)
    except json.JSONDecodeError as error:
        has_mark = text.startswith("\ufeff") and not control_characters
        reason = "Unexpected UTF-8 BOM (decode using utf-8-sig)" if has_mark else error.msg
        raise ValueError(f"{reason} at column {error.colno}") from None
    except RecursionError:
        raise ValueError("nested too deeply") from None
    except ValueError:
        raise ValueError(f"an integer has more than {sys.get_int_max_str_digits():,} digits") from None


def encodable(text: str) -> bool:
    """Whether UTF-8 can encode the text. JSON can contain the escape of a lone surrogate, which UTF-8 cannot encode."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True
