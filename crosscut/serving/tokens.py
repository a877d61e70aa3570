"""Split a text into the parts that its tokens spell. A character that several tokens spell together is not split."""

import codecs
from collections.abc import Iterable
from itertools import accumulate, pairwise


def parts_of(text: str, spelled: Iterable[bytes]) -> list[str]:
    """Split a text into parts, one for each of its tokens. `spelled` holds the bytes of each token.

    A character belongs to the token that completes it. The parts are measured from the end of the text, because the
    first tokens may add something that the text does not contain: a start token that the model expects, or a space from
    the tokenizer.
    """
    decode = codecs.getincrementaldecoder("utf-8")("replace").decode
    ends = list(accumulate(len(decode(one)) for one in spelled))
    surplus = ends[-1] + len(decode(b"", True)) - len(text)
    places = [0, *(min(max(end - surplus, 0), len(text)) for end in ends[:-1]), len(text)]
    return [text[start:end] for start, end in pairwise(places)]
