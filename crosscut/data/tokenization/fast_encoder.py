"""Encoding with gigatoken instead of the tokenizers library, if gigatoken gives the same ids.

gigatoken is many times faster, but new. It is therefore used only for byte-level BPE without a normalizer, the only
kind of tokenizer for which the ids of both libraries were compared. Before use, it must also encode samples in the same
way as the tokenizers library. The samples cover the cases in which tokenizer libraries tend to differ. If a condition
fails, there is no fast encoder, and encoding is only slower.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import tokenizers

MAX_KEPT_CHARACTERS = 32_000_000
"""Number of characters after which the encoder is restarted with an empty cache. gigatoken caches every word. If all
words differ, the cache takes 10 bytes of memory per byte of text.
"""

_UNUSUAL = (
    "\t\n\r\x00\x0b\x0c\x1f\x7f\x85\xa0\xad\u0130\u0131\u0301\u0483\u0600\u0660\u066b\u093e\u09bc\u0e01\u0e33\u1100"
    "\u1160\u180e\u1e9e\u2000\u200b\u200d\u2028\u2029\u202f\u2060\u20dd\u2160\u2460\u3000\u3007\u3042\u4e00\uac00\ufb01"
    "\ufe0f\ufeff\uff21\uff11\ufffd\uffff\U00010400\U0001d7ce\U0001f1e9\U0001f468\U0001f3fd\U0002f800\U000e0067\U0010ffff"
)
"""One character of each class that the regular expressions for words distinguish, and some characters that the
expressions do not match.
"""

SAMPLES = (
    "",
    " ",
    "   ",
    "\n",
    "\r\n\r\n \t x",
    "a  b   c    d",
    "line \n line\n \n  line\n\n\n",
    "tabs\t\tand\t spaces \t\n",
    "trailing   ",
    "don't we'll I'm they're he'd I've it's DON'T WE'LL I'M THEY'RE HE'D I'VE IT'S",
    "'tis ''s '\u2019s o'clock don\u2019t",
    "1 12 123 1234 12345 3.14159 1,000,000 1e-9 0x1F a1b2 2nd \u00bd\u00b2 \u0661\u0662\u0663 \u2167",
    "CamelCase snake_case kebab-case SHOUT iPhone \u00dcber na\u00efve co\u00f6perate stra\u00dfe \u0130stanbul",
    "!?.,;:() ... --- *** ### $100 50% <b>bold</b> https://example.com/a?b=c&d=e#f user@example.com",
    "for (int i = 0; i < n; ++i) {\n\treturn x[i] != y;  // why\n}\n",
    "caf\u00e9 cafe\u0301 \ufb01 \u00c5 A\u030a \u212b \u1e69 s\u0323\u0307",
    "\u041f\u0440\u0438\u0432\u0435\u0442, \u03ba\u03cc\u03c3\u03bc\u03b5, \u0645\u0631\u062d\u0628\u0627",
    "\u0928\u092e\u0938\u094d\u0924\u0947, \u0e2a\u0e27\u0e31\u0e2a\u0e14\u0e35, \u4f60\u597d\u3002\u3053\u3093",
    "\u306b\u3061\u306f \uc548\ub155",
    "\U0001f600\U0001f468\u200d\U0001f469\u200d\U0001f467 \U0001f1e9\U0001f1ea \u2764\ufe0f \U0001f44d\U0001f3fd",
    "antidisestablishmentarianism" * 20,
    "xq" * 3000,
    " " * 1000 + "a" + "\n" * 100 + "=" * 300,
    *(f"a{character}1{character}{character} {character}b '{character}" for character in _UNUSUAL),
)


class FastEncoder:
    """Encoder of gigatoken with the vocabulary of a tokenizer. It runs only on the calling thread."""

    def __init__(self, table: str) -> None:
        self._table = table
        self._start()

    def _start(self) -> None:
        import gigatoken

        self._inner = gigatoken.Tokenizer.from_json(self._table)
        self._left = MAX_KEPT_CHARACTERS

    def encode(self, text: str) -> npt.NDArray[np.uint32]:
        """Return the ids of a text, without an end-of-text id."""
        if self._left <= 0:
            self._start()
        self._left -= len(text)
        ids: npt.NDArray[np.uint32] = self._inner.encode(text)
        return ids


def fast_encoder(inner: tokenizers.Tokenizer) -> FastEncoder | None:
    """Return a fast encoder that gives the same ids as `inner`. `inner` must be set to encode special tokens as plain
    text.

    Returns None if gigatoken is not installed, cannot read the tokenizer, or encodes a sample differently.
    """
    table = json.loads(inner.to_str())
    if not _is_plain_byte_level(table):
        return None
    added = [token["content"] for token in table["added_tokens"]]
    # gigatoken would encode the names of special tokens as these tokens.
    table["added_tokens"] = [token for token in table["added_tokens"] if not token["special"]]
    try:
        encoder = FastEncoder(json.dumps(table))
    except Exception:  # gigatoken may raise any error for an unknown tokenizer
        return None
    samples = [*SAMPLES, *(f"a {token}{token} b{token}c" for token in added)]
    expected = inner.encode_batch_fast(samples, add_special_tokens=False)
    for sample, encoding in zip(samples, expected, strict=True):
        if encoder.encode(sample).tolist() != encoding.ids:
            return None
    return encoder


def _is_plain_byte_level(table: dict[str, Any]) -> bool:
    model, splitter = table["model"], table["pre_tokenizer"] or {}
    steps = splitter.get("pretokenizers", [splitter])
    return (
        model["type"] == "BPE"
        and not model.get("dropout")
        and table["normalizer"] is None
        and any(step.get("type") == "ByteLevel" for step in steps)
    )
