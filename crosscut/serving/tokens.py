"""Bytes of single tokens. A token may be a part of a character, which text cannot represent."""

import codecs
import json
import re
from collections.abc import Iterable
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

from crosscut.data.tokenization.tokenizer import read_inner

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")

_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
"""Character that sentencepiece uses for a space."""


class TokenBytes:
    """Bytes of every token of a `tokenizer.json`. The conversion reproduces the decoders of byte-level BPE and
    sentencepiece.
    """

    def __init__(self, tokenizer: Path) -> None:
        self._inner = read_inner(tokenizer)
        self._added = {number: token.content for number, token in self._inner.get_added_tokens_decoder().items()}
        self._by_character = _byte_of_character() if _is_byte_level(tokenizer) else None

    def __call__(self, token: int) -> bytes:
        """Bytes of a token. Empty for an id without a token."""
        if (added := self._added.get(token)) is not None:
            return added.encode()
        spelled = self._inner.id_to_token(token) or ""
        if self._by_character is not None:
            return b"".join(self._by_character.get(character, character.encode()) for character in spelled)
        if match := _BYTE.fullmatch(spelled):
            return bytes.fromhex(match.group(1))
        return spelled.replace(_SPACE, " ").encode()


def parts_of(text: str, spelled: Iterable[bytes]) -> list[str]:
    """Split a text into the parts that its tokens add to it, given the bytes of each token.

    A character belongs to the token that completes it. The split starts at the end of the text, because the first
    tokens may spell more than the text: the id that a model expects at the start, or a space that the tokenizer adds.
    """
    decode = codecs.getincrementaldecoder("utf-8")("replace").decode
    ends = list(accumulate(len(decode(one)) for one in spelled))
    surplus = ends[-1] + len(decode(b"", True)) - len(text)
    places = [0, *(min(max(end - surplus, 0), len(text)) for end in ends[:-1]), len(text)]
    return [text[start:end] for start, end in pairwise(places)]


def _is_byte_level(tokenizer: Path) -> bool:
    decoder = json.loads(tokenizer.read_text(encoding="utf-8")).get("decoder")
    return any(one.get("type") == "ByteLevel" for one in _decoders(decoder))


def _decoders(decoder: dict[str, Any] | None) -> Iterable[dict[str, Any]]:
    return () if decoder is None else [decoder, *decoder.get("decoders", ())]


def _byte_of_character() -> dict[str, bytes]:
    """Characters with which byte-level BPE spells bytes. A printable byte is spelled as itself, and the other bytes are
    spelled as characters from U+0100 on.
    """
    printing = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printing]
    characters = {byte: chr(byte) for byte in printing} | {byte: chr(256 + i) for i, byte in enumerate(others)}
    return {character: bytes([byte]) for byte, character in characters.items()}
