"""Find the main text of a web page: the whole article and little else.

The elements that the rules of `boilerplate` find are removed from the page, and the library resiliparse extracts the
main text of the rest. If too little remains, the page is extracted with fewer rules.
"""

from collections import defaultdict
from typing import Any

from resiliparse.extract.html2text import extract_plain_text
from resiliparse.parse.html import ElementNode, HTMLTree, Node

from crosscut.corpus.extraction.boilerplate import FRAME, Rule, find_rule
from crosscut.corpus.extraction.ends import LABEL_CHARACTERS, PROSE_BYTES, is_prose, without_ends
from crosscut.corpus.extraction.words import LABELS, plain

LITTLE_TEXT = 250
"""Number of characters below which a main text is suspiciously short, if the page is long."""
LONG_PAGE = 4
"""If a main text is suspiciously short, and the text of the whole page is more than this many times as long, the text
of the whole page is used instead."""

BOX_BYTES = 300
"""Minimum size of an element of prose in bytes. Bytes are fairer than characters: Chinese, for example, needs few
characters, but three bytes for each."""
PROSE_PER_LINK = 100
"""Minimum number of characters per link. A text with more links is not prose."""

MAX_LOWERED = 3000
"""Maximum number of lists, of figures and of dates of a page that are kept, because each takes as much time as 10 other
elements."""

READ_PER_PAGE = 20
"""Maximum number of characters that are read to judge the elements of a page, as a multiple of the page's length.
Without this limit, the time would grow with the square of the number of nested elements."""

FRAME_TAGS = ["nav", "footer", "form"]
"""Elements that are left out even if nothing remains of a page."""
_UNJUDGED = (
    "a, abbr, article, b, cite, code, dd, details, dt, em, figcaption, figure, h1, i, img, input, kbd, label, li, main"
    ", option, path, pre, small, span, strong, svg, time, tr"
)
NAMED = f"[class]:not({_UNJUDGED}), [id]:not({_UNJUDGED})"
"""Elements that a rule may remove because of their classes or ids. Elements inside a line of text or code are excluded,
because their classes mean something else, such as rustdoc's `comment`."""
ARTICLE = "main, [role=main], [itemprop=articleBody]"
"""Elements that contain the article."""
HIGH_LISTS = "body > ul, body > * > ul, body > * > * > ul"
"""Lists that resiliparse takes for the menu of the site, because few elements are around them."""
FIGURES = "figure, figcaption"
"""Elements that resiliparse leaves out, with their captions, tables and listings."""
EMBEDDED = "form"
"""Element of a figure that shows that the figure is a program, such as a player, and its words are those of buttons."""
KNOWN = f"h1, h2, h3, h4, h5, h6, nav, form, body > address, {FIGURES}, time, {ARTICLE}, {HIGH_LISTS}"
"""Elements that are known by their tag, role or place. One search finds all of them, because a search takes time."""
MAX_LINKED = 0.5
"""Maximum share of links in the text of a figure, or of a list with many links. With a larger share, it is a menu."""
LABELLED_SHARE, LABELLED_PER_LINK = 0.3, 400
"""Maximum share of the page's text that a part with a label may have, and its maximum number of characters per link:
each link may have a teaser."""
LINES = "p, div, li, dd, dt, td, th, blockquote, figcaption, h1, h2, h3, h4, h5, h6"
"""Elements that contain a line of text, unless they contain other elements of `BLOCKS`."""
BLOCKS = "p, div, li, select, input, textarea"
"""Elements that no paragraph contains."""
FORM_PARAGRAPHS, FORM_SHARE = 2, 0.5
"""Minimum number of paragraphs of prose in a form that is the main part of a page, and their minimum share of those of
the page."""
WRAPPERS = 5
"""Maximum number of elements between the heading that is a label and the part that it opens."""

_KINDS = {
    **dict.fromkeys(("h2", "h3", "h4", "h5", "h6"), "heading"),
    **dict.fromkeys(("nav", "form", "address"), "frame"),
    "h1": "title",
    **dict.fromkeys(("figure", "figcaption"), "figure"),
    "time": "time",
    "ul": "list",
}
"""Kinds of the elements that `KNOWN` finds, by tag. All others are of the kind `article`."""


def find_main_text(tree: HTMLTree, markup: str) -> str:
    """Return the main text of a page, with blank lines between paragraphs.

    `tree` is the parsed page; its boilerplate is removed. `markup` is the page's source, which is parsed again if too
    little text is found.
    """
    if tree.body is None:
        return ""
    _remove_boilerplate(tree, tree.body)
    text = without_ends(_extract(tree, main_content=True))
    if len(text) >= LITTLE_TEXT:
        return text
    whole = _extract(tree, main_content=False, skip_elements=[*FRAME_TAGS, "aside", "header"])
    if len(whole) < LITTLE_TEXT:
        last = _extract(HTMLTree.parse(markup), main_content=False, noscript=True, skip_elements=FRAME_TAGS)
        whole = last if len(last) >= LITTLE_TEXT else whole
    return whole if len(whole) > LONG_PAGE * len(text) else text


def _extract(tree: HTMLTree, **options: Any) -> str:
    return extract_plain_text(tree, alt_texts=False, comments=False, **options).strip()


def _remove_boilerplate(tree: HTMLTree, body: ElementNode) -> None:
    """Remove the elements that a rule finds, and the parts of the page that a label opens.

    If an element that a rule finds contains the article, the element stays but loses its classes and id, so that
    resiliparse keeps it too. The first `<h1>` and the first element of `ARTICLE` belong to the article.
    """
    known: defaultdict[str, list[ElementNode]] = defaultdict(list)
    # A slice copies the list once. To iterate over the list itself would search the page again for each element.
    for element in body.query_selector_all(KNOWN)[:]:
        known[_KINDS.get(element.tag or "", "article")].append(element)
    for figure in known["figure"][:MAX_LOWERED]:
        if body.contains(figure) and _is_caption(figure):
            for inner in [figure, *figure.query_selector_all(FIGURES)[:]]:
                _open(tree, inner, "div")
    anchors = [*known["title"][:1], *known["article"][:1]]
    page = len(body.text or "")
    unread = READ_PER_PAGE * page
    unread -= _open_dates(tree, known["time"][:MAX_LOWERED], unread)
    for element in known["frame"]:
        if unread > 0 and body.contains(element):
            unread -= _judge_frame(element, body, page, anchors)
    for element in body.query_selector_all(NAMED)[:]:
        rule = find_rule(element.class_name or "", element.id or "")
        if rule and unread > 0 and body.contains(element):
            unread -= _judge(element, rule, page, anchors)
    for heading in known["heading"]:
        label = heading.text or ""
        if unread > 0 and len(label) <= LABEL_CHARACTERS and plain(label) in LABELS and body.contains(heading):
            unread -= _remove_labelled(heading, page, anchors)
    for high in known["list"][:MAX_LOWERED]:
        if body.contains(high) and _is_text(high):
            _lower(tree, high)


def _open_dates(tree: HTMLTree, dates: list[ElementNode], unread: int) -> int:
    """Keep the dates in lines of other text, which resiliparse leaves out. A line with only a date stays left out. At
    most about `unread` characters are read. Return the number of characters that were read.
    """
    num_read = 0
    lines: defaultdict[ElementNode, list[ElementNode]] = defaultdict(list)
    for date in dates:
        if (line := date.closest(LINES)) is not None:
            lines[line].append(date)
    for line, own in lines.items():
        if num_read >= unread:
            break
        text = line.text or ""
        num_read += len(text)
        if not line.query_selector(BLOCKS) and len(_joined(text)) > sum(len(_joined(date.text or "")) for date in own):
            for date in own:
                _open(tree, date, "span")
    return num_read


def _joined(text: str) -> str:
    return "".join(text.split())


def _judge_frame(element: ElementNode, body: ElementNode, page: int, anchors: list[ElementNode]) -> int:
    """Remove an element, unless it is a form that explains itself on a page with little other prose. Return the number
    of characters that were read.
    """
    num_read = 0
    if element.tag == "form" and _explains(element, page):
        num_read = page
        if _num_paragraphs(element) >= FORM_SHARE * _num_paragraphs(body):
            return num_read
    return num_read + _judge(element, FRAME, page, anchors)


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


def _remove_labelled(heading: ElementNode, page: int, anchors: list[ElementNode]) -> int:
    """Remove the part of the page that begins with this heading, if it has many links. Return the number of characters
    that were read.
    """
    label = (heading.text or "").strip()
    part, num_read = heading, 0
    for _ in range(WRAPPERS):
        parent = part.parent
        if not isinstance(parent, ElementNode) or parent.tag == "body":
            break
        part, text = parent, parent.text or ""
        num_read += len(text)
        if text.strip() != label:
            is_small = len(text) <= LABELLED_SHARE * page
            is_apart = text.lstrip().startswith(label) and not any(map(part.contains, anchors))
            if is_small and is_apart and len(text) <= LABELLED_PER_LINK * _num_links(part):
                part.remove()
            break
    return num_read


def _explains(form: ElementNode, page: int) -> bool:
    """Whether a form that is a small part of the page says at length what it is for."""
    text = form.text or ""
    if len(text) > FRAME.max_share * page or len(text.encode("utf-8", "replace")) < FORM_PARAGRAPHS * PROSE_BYTES:
        return False
    return _num_paragraphs(form) >= FORM_PARAGRAPHS


def _num_paragraphs(element: ElementNode) -> int:
    """Return the number of paragraphs of prose. An element around other paragraphs or fields is none."""
    blocks = element.query_selector_all("p, div")[:]
    return sum(not block.query_selector(BLOCKS) and is_prose((block.text or "").strip()) for block in blocks)


def _is_text(block: ElementNode) -> bool:
    """Whether a list is text, and not a menu."""
    return len(block.text or "") >= PROSE_PER_LINK * _num_links(block) or not _is_linked(block)


def _is_linked(block: ElementNode) -> bool:
    links = block.get_elements_by_tag_name("a")[:]
    return sum(len(link.text or "") for link in links) > MAX_LINKED * len(block.text or "")


def _is_caption(figure: ElementNode) -> bool:
    """Whether an element of `FIGURES` has text, and is neither a link, nor a program, nor part of another figure."""
    parent = figure.parent
    if not isinstance(parent, ElementNode) or parent.closest(f"a, {FIGURES}") is not None:
        return False
    return bool((figure.text or "").strip()) and not _is_linked(figure) and figure.query_selector(EMBEDDED) is None


def _open(tree: HTMLTree, element: ElementNode, tag: str) -> None:
    """Put an element with another tag in place of one whose text resiliparse leaves out."""
    other, parent = tree.create_element(tag), element.parent
    if other is not None and parent is not None:
        parent.insert_before(other, element)
        while element.first_child is not None:
            other.append_child(element.first_child)
        element.remove()


def _num_links(element: ElementNode) -> int:
    return len(element.get_elements_by_tag_name("a"))


def _lower(tree: HTMLTree, high: ElementNode) -> None:
    """Put a list into three more elements, so that resiliparse does not take it for the menu of the site."""
    inner: Node = high
    for _ in range(3):
        outer, parent = tree.create_element("div"), inner.parent
        if outer is not None and parent is not None:
            parent.insert_before(outer, inner)
            outer.append_child(inner)
            inner = outer


def _is_prose(element: ElementNode, text: str) -> bool:
    if len(text.encode("utf-8", "replace")) < BOX_BYTES:
        return False
    return len(text) >= PROSE_PER_LINK * _num_links(element)
