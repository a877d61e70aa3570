"""Replace HTML tags, superscripts, quotes for bold and italic text, and magic words.

A superscript of digits becomes the superscript characters of Unicode: 10<sup>3</sup> becomes 10³. The result looks like
the printed page, the number keeps its value, and units are written as in other texts (km²). Letters have no superscript
characters: an ordinal stays as it is read aloud (19<sup>th</sup> becomes 19th), and an exponent gets a circumflex
(x<sup>n</sup> becomes x^n). A subscript stays plain, as in H2O, unless it would join a number (1010<sub>2</sub> becomes
1010₂) or a name (v<sub>max</sub> becomes v_max).
"""

import re

from crosscut.corpus.readers.wikitext.markup import GAP

_BREAK = re.compile(r"<(?:br\b[^<>]*|/br)>\n?", re.IGNORECASE)
_BLOCK = re.compile(
    r"</?(?:p|div|center|blockquote|poem|li|ul|ol|dl|dt|dd|hr|h[1-6]|tr|td|th|caption|tbody|thead|section)\b[^<>]*>",
    re.IGNORECASE,
)
_INLINE = re.compile(
    r"</?(?:abbr|b|bdi|bdo|big|cite|code|data|del|dfn|em|font|i|ins|kbd|mark|noinclude|nobr|onlyinclude|q|wbr|rb|rp|rt|rtc|"
    r"ruby|s|samp|small|span|strike|strong|time|tt|u|var|references|ref|langconvert|phonos)\b[^<>]*>",
    re.IGNORECASE,
)
_SCRIPT = re.compile(r"<(su[bp])\b[^<>]*>([^<>]*)</\1\s*>", re.IGNORECASE)
_CLOSED = re.compile(r"</su[bp]>$|'+$")
_LOST_SCRIPT = re.compile(r"</?su[bp]\b[^<>]*>", re.IGNORECASE)
_MAGIC = re.compile(
    r"(?:__|＿＿)(?:(?i:(?:NO|FORCE)?TOC|NOGALLERY|NOEDITSECTION|NOCC|NOTC)|"
    r"(?!(?:FILE|LINE|DATE|TIME|DIR|CLASS|METHOD|NAMESPACE|FUNCTION|COUNTER|VA_|STDC|GNUC|cplusplus))"
    r"[^\W\d_a-zà-ÿ][^\sa-zà-ÿ]{1,40}?)(?:__|＿＿)"
)
"""Pattern for magic words: words in capitals between double underscores, except the macros of programming languages. In
scripts without capitals, any letters count."""

_QUOTES = re.compile(r"''+")
_LETTER_AND_THREE = re.compile(r"(?<!\w)(\w)'''(?!')")
_THREE = re.compile(r"(?<=[^\s'])'''(?!')")

MAX_SCRIPT = 40
"""Maximum length of a superscript or subscript. Longer content is written as ordinary text."""

_RAISED = str.maketrans("0123456789+-−–=()", "⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁻⁻⁼⁽⁾")
_LOWERED = str.maketrans("0123456789+-−–=()", "₀₁₂₃₄₅₆₇₈₉₊₋₋₋₌₍₎")
_NUMBER = re.compile(r"[0-9+−–=()-]+")
_EXPONENT = re.compile(r"[−–-]?\w|(?!\(.*\)$)(?=.*[\d+−–=*/·-])[\w +−–=*/·.,()-]+")
_ORDINAL = frozenset((
    "a", "d", "e", "o", "er", "os", "as", "re", "me", "ro", "ra", "th", "st", "nd", "rd", "ème", "ère",
))  # fmt: skip
"""Superscripts that are read as the end of a word, as in 1er. Superscripts of one letter, except `e` and `o`, count
only after a digit, as in 1a."""


def remove_tags(markup: str) -> str:
    """Remove tags. `<br>` becomes a space, and a tag of a paragraph or an item of a list becomes a new line."""
    if "<" not in markup:
        return markup
    text = _BREAK.sub(" ", markup)
    text = _INLINE.sub("", _BLOCK.sub("\n", text))
    if "<su" in text.lower():
        for _ in range(2):  # a superscript may hold a subscript
            text = _SCRIPT.sub(_script, text)
        text = _LOST_SCRIPT.sub("", text)
    return text


def _script(found: re.Match[str]) -> str:
    content = found[2].replace(GAP, "").strip()
    if len(content) > MAX_SCRIPT:
        return content
    before = _CLOSED.sub("x", found.string[max(found.start() - 8, 0) : found.start()])[-1:]
    return _exponent(content, before) if found[1].lower() == "sup" else _index(content, before)


def raised(content: str) -> str:
    """Write a number in superscript characters. Any other content is returned unchanged."""
    return content.translate(_RAISED) if _NUMBER.fullmatch(content) else content


def _exponent(content: str, before: str) -> str:
    """Write a superscript. `before` is the character before the superscript, or empty."""
    is_ordinal = content in _ORDINAL and (before.isdigit() or len(content) > 1 or content in "eo")
    if is_ordinal or not _EXPONENT.fullmatch(content) or not (before.isalnum() or before == ")"):
        return raised(content)
    return raised(content) if _NUMBER.fullmatch(content) else _linear("^", content)


def _index(content: str, before: str) -> str:
    """Write a subscript. `before` is the character before the subscript, or empty."""
    if before.isdigit() and _NUMBER.fullmatch(content):
        return content.translate(_LOWERED)
    is_index = content.isalnum() or _EXPONENT.fullmatch(content)
    return content if content.isdigit() or not before.isalnum() or not is_index else _linear("_", content)


def _linear(sign: str, content: str) -> str:
    return f"{sign}{content}" if content.isalnum() else f"{sign}({content})"


def remove_magic_words(markup: str) -> str:
    """Remove magic words such as `__TOC__`, in any language."""
    return _MAGIC.sub("", markup) if "__" in markup or "＿＿" in markup else markup


def remove_quotes(markup: str) -> str:
    """Remove the quotes that make text bold or italic. Other apostrophes stay: l'''Iliade'' becomes l'Iliade."""
    if "''" not in markup:
        return markup
    return "\n".join(_unquoted(line) if "''" in line else line for line in markup.split("\n"))


def _unquoted(line: str) -> str:
    """Remove the quotes of a line.

    Two quotes begin or end italic text, three begin or end bold text, and five begin or end both. Surplus quotes are
    kept as text.
    """
    runs = [len(run) for run in _QUOTES.findall(line)]
    italics = sum(run == 2 or run >= 5 for run in runs)
    bolds = sum(run >= 3 for run in runs)
    if italics % 2 and bolds % 2:  # three of the quotes are an apostrophe in front of italic text
        line, changed = _LETTER_AND_THREE.subn(r"\1'", line, count=1)
        line = line if changed else _THREE.sub("'", line, count=1)
    return _QUOTES.sub(lambda run: "'" * (1 if len(run[0]) == 4 else max(len(run[0]) - 5, 0)), line)
