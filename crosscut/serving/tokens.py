"""Split a text into the parts that its tokens spell. A character that several tokens spell together is not split."""

import codecs
from collections.abc import Iterable, Iterator


def surplus_of(text: str, spelled: Iterable[bytes]) -> int:
    """Number of characters by which the tokens of a text exceed the text. `spelled` holds the bytes of each token.

    The first tokens may add something that the text does not contain: a start token that the model expects, or a space
    from the tokenizer.
    """
    decode = codecs.getincrementaldecoder("utf-8")("replace").decode
    return sum(len(decode(one)) for one in spelled) + len(decode(b"", True)) - len(text)


def parts_of(text: str, spelled: Iterable[bytes], *, count: int, surplus: int) -> Iterator[str]:
    """Split a text into parts, one for each of its `count` tokens, and yield the parts. `spelled` holds the bytes of
    each token, and `surplus` is the result of `surplus_of`.

    A character belongs to the token that completes it. The parts are measured from the end of the text, because the
    surplus is at its start.
    """
    decode = codecs.getincrementaldecoder("utf-8")("replace").decode
    start, num_decoded = 0, 0
    for number, one in enumerate(spelled, 1):
        num_decoded += len(decode(one))
        end = len(text) if number == count else min(max(num_decoded - surplus, 0), len(text))
        yield text[start:end]
        start = end
