"""Lines of a file that is small enough to be in memory."""


def lines_of(text: str) -> list[str]:
    r"""The lines of a text, which end in \n or \r\n; the last may be empty.

    `str.splitlines` also ends them at U+2028, U+0085 and other characters that JSON and prose may hold as they are.
    """
    return [line.removesuffix("\r") for line in text.split("\n")]
