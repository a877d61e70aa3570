"""Division of a string into lines."""


def lines_of(text: str) -> list[str]:
    r"""Split a text into lines, which end in \n or \r\n. The last line may be empty.

    Unlike `str.splitlines`, this function does not split at U+2028, U+0085 and other characters that JSON and prose may
    contain within a line.
    """
    return [line.removesuffix("\r") for line in text.split("\n")]
