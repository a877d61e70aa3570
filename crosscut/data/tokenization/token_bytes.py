"""Bytes of single tokens. A token may be a part of a character, which text cannot represent."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from crosscut.data.tokenization.inner import read_inner

if TYPE_CHECKING:
    import tokenizers

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")

_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
"""Character that sentencepiece uses for a space."""


class TokenBytes:
    """Bytes of every token of a tokenizer. The conversion gives the same bytes as the decoders of byte-level BPE,
    sentencepiece and WordPiece. A WordPiece does not store blanks, so a blank is put before every token that begins a
    word.
    """

    def __init__(self, inner: tokenizers.Tokenizer) -> None:
        self._inner = inner
        added = inner.get_added_tokens_decoder()
        self._added = {number: token.content for number, token in added.items()}
        self.special = [number for number, token in added.items() if token.special]
        """Ids of the special tokens."""
        decoders = _decoders(inner)
        self._by_character = byte_of_character() if any(one["type"] == "ByteLevel" for one in decoders) else None
        self._has_spaces = any(_SPACE in (one.get("replacement", ""), _pattern(one)) for one in decoders)
        self._continuation = next((str(one["prefix"]) for one in decoders if one["type"] == "WordPiece"), "")

    @classmethod
    def load(cls, path: Path) -> TokenBytes:
        """Load the tokens of a `tokenizer.json`."""
        return cls(read_inner(path))

    @property
    def is_byte_level(self) -> bool:
        """Whether the tokenizer is a byte-level BPE, in which the bytes of a text are the bytes of its tokens."""
        return self._by_character is not None

    def is_byte(self, token: int) -> bool:
        """Whether a token of sentencepiece stands for a single byte, which may be a part of a character."""
        return token not in self._added and bool(_BYTE.fullmatch(self._inner.id_to_token(token) or ""))

    def begins_word(self, token: int) -> bool:
        """Whether a token begins a word. In byte-level BPE and sentencepiece, the first character of such a token is a
        blank. In WordPiece, such a token lacks the prefix of a continuation (`##`). In other tokenizers, every token is
        a word.
        """
        if token in self._added:
            return True
        spelled = self._inner.id_to_token(token) or ""
        if self._by_character is not None:
            return self(token)[:1].isspace()
        if self._continuation:
            return not spelled.startswith(self._continuation)
        return spelled.startswith(_SPACE) or not self._has_spaces

    @cached_property
    def longest(self) -> int:
        """Number of bytes of the longest token."""
        return max(len(self(token)) for token in self.ids.tolist())

    @cached_property
    def ids(self) -> npt.NDArray[np.int64]:
        """Ids of all tokens, ascending. They may have large gaps."""
        return np.unique(np.array(list(self._inner.get_vocab(with_added_tokens=True).values()), dtype=np.int64))

    def count(self, tokens: npt.NDArray[np.int64]) -> int:
        """Count the UTF-8 bytes of the text that `tokens` decode to, without special tokens. If the text ends inside a
        character, only the bytes that `tokens` hold are counted.
        """
        if self._lengths is not None:
            return int(self._lengths[tokens].sum())
        spelled = tokens.tolist()
        whole = len(spelled)
        while whole and self.is_byte(spelled[whole - 1]):  # the last bytes may be a part of a character
            whole -= 1
        return len(self._inner.decode(spelled[:whole]).encode()) + len(spelled) - whole

    @cached_property
    def _lengths(self) -> npt.NDArray[np.int64] | None:
        """Number of bytes of every token, [vocabulary]. None unless the tokenizer is a byte-level BPE, whose tokens
        spell the bytes of a text one after another.
        """
        if not self.is_byte_level:
            return None
        lengths = np.zeros(self.ids[-1] + 1, dtype=np.int64)
        lengths[self.ids] = [len(self(token)) for token in self.ids.tolist()]
        lengths[self.special] = 0
        return lengths

    def __call__(self, token: int) -> bytes:
        """Bytes of a token. Empty for an id without a token."""
        if (added := self._added.get(token)) is not None:
            return added.encode()
        spelled = self._inner.id_to_token(token) or ""
        if self._by_character is not None:
            return b"".join(self._by_character.get(character, character.encode()) for character in spelled)
        if match := _BYTE.fullmatch(spelled):
            return bytes.fromhex(match.group(1))
        if self._continuation and spelled:
            rest = spelled.removeprefix(self._continuation)
            return rest.encode() if rest != spelled else f" {spelled}".encode()
        return spelled.replace(_SPACE, " ").encode()


def _decoders(inner: tokenizers.Tokenizer) -> list[dict[str, object]]:
    """Settings of the decoder and, for a sequence of decoders, of its parts."""
    if inner.decoder is None:
        return []
    decoder = json.loads(inner.decoder.__getstate__())  # `to_str` would also write the vocabulary, which takes longer
    return [decoder, *decoder.get("decoders", ())]


def _pattern(decoder: Mapping[str, object]) -> str:
    """String that a decoder replaces. Empty if the decoder replaces no string."""
    pattern = decoder.get("pattern")
    return str(pattern.get("String", "")) if isinstance(pattern, dict) else ""


def byte_of_character() -> dict[str, bytes]:
    """Characters with which byte-level BPE spells bytes. A printable byte is spelled as itself, and the other bytes are
    spelled as characters from U+0100 on.
    """
    printing = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printing]
    characters = {byte: chr(byte) for byte in printing} | {byte: chr(256 + i) for i, byte in enumerate(others)}
    return {character: bytes([byte]) for byte, character in characters.items()}
