"""Special tokens around the texts of a decoder that solves a task. Its rows end with the end-of-text token, from which
the model predicts the label:

    [begin of text] a [line break] b <end of text>
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import tokenizers


class Special(NamedTuple):
    """Special token ids of a decoder."""

    begin: int | None
    """Token id at the start of a text. None if the model expects no such token."""
    end: int
    """Token id at the end of a text."""


def surround(inner: tokenizers.Tokenizer, special: Special) -> None:
    """Make a tokenizer put a decoder's special tokens around its texts, in place of those in its file."""
    from tokenizers import processors

    ids = {"<end>": [special.end], "<line>": inner.encode("\n", add_special_tokens=False).ids}
    if special.begin is not None:
        ids["<begin>"] = [special.begin]
    begin = ["<begin>:0"] if special.begin is not None else []
    line = ["<line>:0"] if ids["<line>"] else []
    inner.post_processor = processors.TemplateProcessing(
        single=[*begin, "$A:0", "<end>:0"],
        pair=[*begin, "$A:0", *line, "$B:0", "<end>:0"],
        special_tokens=[
            {"id": name, "ids": numbers, "tokens": [str(inner.id_to_token(one)) for one in numbers]}
            for name, numbers in ids.items()
            if numbers
        ],
    )
