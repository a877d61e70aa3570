"""Special tokens of masked language modelling, with their names in BERT and RoBERTa."""

from __future__ import annotations

from collections.abc import Container
from typing import TYPE_CHECKING, NamedTuple

from crosscut.config.checks import listed
from crosscut.config.errors import DataError

if TYPE_CHECKING:
    import tokenizers

_NAMES = {
    "begin": ("[CLS]", "<s>"),
    "separator": ("[SEP]", "</s>"),
    "mask": ("[MASK]", "<mask>"),
    "padding": ("[PAD]", "<pad>"),
}
"""Names of each special token, BERT's name first."""

_PURPOSES = {
    "begin": "begins a sequence",
    "separator": "ends a segment",
    "mask": "replaces a token that the model predicts",
    "padding": "fills up a short sequence",
}


class SpecialTokens(NamedTuple):
    """Ids of the special tokens of masked language modelling."""

    begin: int
    """Id at the start of every sequence, `[CLS]`."""

    separator: int
    """Id at the end of every segment, `[SEP]`."""

    mask: int
    """Id in place of a token to predict, `[MASK]`."""

    padding: int
    """Id after the end of a short sequence, `[PAD]`."""


def special_tokens(inner: tokenizers.Tokenizer, *, name: str) -> SpecialTokens:
    """Find the special tokens of a tokenizer. Raises `DataError` if a token is missing; the message begins with
    `name`.
    """
    ids = {}
    for purpose, names in _NAMES.items():
        found = [number for token in names if (number := inner.token_to_id(token)) is not None]
        if not found:
            raise DataError(
                f"{name} must have a token that {_PURPOSES[purpose]} ({listed(f'`{token}`' for token in names)}) for "
                "masked language modelling, but has none. Use the tokenizer of a BERT or a RoBERTa, or leave the "
                "option empty to train a tokenizer."
            )
        ids[purpose] = found[0]
    return SpecialTokens(**ids)


def padding_token(
    inner: tokenizers.Tokenizer, *, below: int, named: str = "", taken: Container[int | None] = ()
) -> int | None:
    """Id of the token for padding: the one with the name `named` or, if there is none, with a usual name. The id is
    below `below` and is not in `taken`. None if there is no such token.
    """
    found = map(inner.token_to_id, (named, *_NAMES["padding"]))
    return next((one for one in found if one is not None and one < below and one not in taken), None)


def names_of_special_tokens(inner: tokenizers.Tokenizer) -> dict[str, str]:
    """Names of the special tokens, with the keys of a `tokenizer_config.json`. Empty unless the tokenizer has all of
    these tokens.
    """
    try:
        ids = special_tokens(inner, name="")
    except DataError:
        return {}
    keys = zip(("cls_token", "sep_token", "mask_token", "pad_token"), ids, strict=True)
    return {key: name for key, number in keys if (name := inner.id_to_token(number)) is not None}
