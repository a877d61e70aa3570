"""Find the main text of a web page: the whole article and little else.

The elements that the rules of `boilerplate` find are removed from the page, and the library resiliparse extracts the
main text of the rest. If too little remains, the page is extracted with fewer rules.
"""

from typing import Any

from resiliparse.extract.html2text import extract_plain_text
from resiliparse.parse.html import ElementNode, HTMLTree

from crosscut.corpus.extraction.boilerplate import FRAME, Rule, find_rule

LITTLE_TEXT = 250
"""Number of characters below which a main text is suspiciously short, if the page is long."""
LONG_PAGE = 4
"""If a main text is suspiciously short, and the text of the whole page is more than this many times as long, the text
of the whole page is used instead."""

PROSE_BYTES = 300
"""Minimum size of prose in bytes. Bytes are fairer than characters: Chinese, for example, needs few characters, but
three bytes for each."""
PROSE_PER_LINK = 100
"""Minimum number of characters per link. A text with more links is not prose."""

READ_PER_PAGE = 20
"""Maximum number of characters that are read to judge the elements of a page, as a multiple of the page's length.
Without this limit, the time would grow with the square of the number of nested elements."""

FRAME_TAGS = ["nav", "footer", "form"]
"""Elements that are left out even if nothing remains of a page."""
FRAMES = "form, body > address"
"""Elements that are boilerplate whatever their classes and ids are. Resiliparse itself leaves out more elements, such
as `nav`."""
_UNJUDGED = (
    "a, abbr, article, b, cite, code, em, figcaption, figure, h1, i, img, input, kbd, main, path, pre, small, span"
    ", strong, svg, time"
)
NAMED = f"[class]:not({_UNJUDGED}), [id]:not({_UNJUDGED})"
"""Elements that a rule may remove because of their classes or ids. Elements inside a line of text or code are excluded,
because their classes mean something else, such as rustdoc's `comment`."""
ANCHORS = ("h1", "main, [role=main], [itemprop=articleBody]")
"""Elements that belong to the article or contain the article. The first element of each kind is never removed."""


def find_main_text(tree: HTMLTree, markup: str) -> str:
    """Return the main text of a page, with blank lines between paragraphs.

    `tree` is the parsed page; its boilerplate is removed. `markup` is the page's source, which is parsed again if too
    little text is found.
    """
    if tree.body is None:
        return ""
    page = len(tree.body.text or "")
    remove_boilerplate(tree.body, page)
    text = _extract(tree, main_content=True)
    if len(text) >= LITTLE_TEXT:
        return text
    whole = _extract(tree, main_content=False, skip_elements=[*FRAME_TAGS, "aside", "header"])
    if len(whole) < LITTLE_TEXT:
        last = _extract(HTMLTree.parse(markup), main_content=False, noscript=True, skip_elements=FRAME_TAGS)
        whole = last if len(last) >= LITTLE_TEXT else whole
    return whole if len(whole) > LONG_PAGE * len(text) else text


def _extract(tree: HTMLTree, **options: Any) -> str:
    return extract_plain_text(tree, alt_texts=False, comments=False, **options).strip()


def remove_boilerplate(body: ElementNode, page: int) -> None:
    """Remove the elements that a rule finds. `page` is the number of characters of the page.

    If an element that a rule finds contains the article, the element stays but loses its classes and id, so that
    resiliparse keeps it too.
    """
    anchors = [found for found in map(body.query_selector, ANCHORS) if found is not None]
    unread = READ_PER_PAGE * page
    # A slice copies the list once. To iterate over the list itself would search the page again for each element.
    frames = [(element, FRAME) for element in body.query_selector_all(FRAMES)[:]]
    named = [
        (element, find_rule(element.class_name or "", element.id or ""))
        for element in body.query_selector_all(NAMED)[:]
    ]
    for element, rule in frames + [(element, rule) for element, rule in named if rule]:
        if unread > 0 and body.contains(element):
            unread -= _judge(element, rule, page, anchors)


def _judge(element: ElementNode, rule: Rule, page: int, anchors: list[ElementNode]) -> int:
    """Remove an element, or keep it without its classes and id. Return the number of characters that were read."""
    text = element.text or ""
    is_large = len(text) > rule.max_share * page
    if is_large or any(map(element.contains, anchors)) or (rule.spares_prose and _is_prose(element, text)):
        if not rule.keeps_names:
            element.remove_attribute("class")
            element.remove_attribute("id")
    else:
        element.remove()
    return len(text)


def _is_prose(element: ElementNode, text: str) -> bool:
    if len(text.encode("utf-8", "replace")) < PROSE_BYTES:
        return False
    return len(text) >= PROSE_PER_LINK * len(element.get_elements_by_tag_name("a"))
