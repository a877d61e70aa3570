"""Compare tokens with the characters from which they were made, whatever the tokenizer.

Tokens spell the normalized text in one of several ways: as characters, as the characters that stand for bytes in
byte-level BPE, or as single bytes such as `<0xE2>`. Marks of word pieces (`##`, `</w>`) are removed, and so are blanks
and what stands for blanks on both sides, because a tokenizer may insert or remove them.
"""

import json
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from crosscut.data.tokenization.token_bytes import byte_of_character
from crosscut.finetuning.encoding.rows import Mask, Numbers

if TYPE_CHECKING:
    import tokenizers

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
_BLANK = "\N{LOWER ONE EIGHTH BLOCK}"


class Spelling:
    """Way in which the tokens of one tokenizer spell a text."""

    def __init__(self, inner: "tokenizers.Tokenizer") -> None:
        self._inner, model = inner, inner.model
        parts = _parts(inner.pre_tokenizer)
        self._bytes = byte_of_character() if any(part["type"] == "ByteLevel" for part in parts) else {}
        self._blanks = {_BLANK, *(part["replacement"] for part in parts if part["type"] == "Metaspace")}
        self._prefix = getattr(model, "continuing_subword_prefix", None) or ""
        self._suffix = getattr(model, "end_of_word_suffix", None) or ""
        unknown = getattr(model, "unk_token", None)
        self._unknown = getattr(model, "unk_id", None) if unknown is None else inner.token_to_id(unknown)

    def agrees(self, context: str, ids: Sequence[int], characters: Numbers, span: tuple[int, int]) -> bool:
        """Whether the tokens of a span, from the first to the last one, spell the characters of `context` at their
        places, `characters` [S, 2]. Neighbours that share a character with these tokens are read, too. True if there is
        an unknown token, which spells nothing.
        """
        chosen: Mask = np.zeros(len(ids), dtype=np.bool_)
        chosen[span[0] : span[1] + 1] = True
        number = 0
        while chosen.sum() > number:
            number, (start, end) = int(chosen.sum()), (characters[chosen, 0].min(), characters[chosen, 1].max())
            chosen = (characters[:, 0] >= 0) & (characters[:, 0] < end) & (characters[:, 1] > start)
        read = [ids[place] for place in chosen.nonzero()[0].tolist()]
        return self._unknown in read or self.spells(read, _covered(context, characters[chosen]))

    def spells(self, ids: Sequence[int], text: str) -> bool:
        """Whether tokens spell a text, but for blanks."""
        return self._plain(b"".join(map(self._of_token, ids))) == self._plain(self._normalized(text).encode())

    def is_removed(self, character: str) -> bool:
        """Whether the normalizer removes a character, or makes it a blank."""
        return not self._normalized(character).strip()

    def _normalized(self, text: str) -> str:
        normalizer = self._inner.normalizer
        return text if normalizer is None else normalizer.normalize_str(text)

    def _of_token(self, token: int) -> bytes:
        spelled = (self._inner.id_to_token(token) or "").removeprefix(self._prefix).removesuffix(self._suffix)
        if match := _BYTE.fullmatch(spelled):
            return bytes.fromhex(match.group(1))
        return b"".join(self._bytes.get(character, character.encode()) for character in spelled)

    def _plain(self, spelled: bytes) -> str:
        return "".join(
            each for each in spelled.decode(errors="replace") if not each.isspace() and each not in self._blanks
        )


def _covered(context: str, places: Numbers) -> str:
    """Characters at the places of tokens. A tokenizer may drop characters between them."""
    start = int(places[:, 0].min())
    is_covered: Mask = np.zeros(int(places[:, 1].max()) - start, dtype=np.bool_)
    for first, end in (places - start).tolist():
        is_covered[first:end] = True
    return "".join(context[start + place] for place in is_covered.nonzero()[0].tolist())


def _parts(component: Any) -> list[dict[str, Any]]:
    """Settings of a pre-tokenizer and, for a sequence, of its parts."""
    if component is None:
        return []
    found, parts = [json.loads(component.__getstate__())], []
    while found:
        parts.append(each := found.pop())
        found += each.get("pretokenizers", ())
    return parts
