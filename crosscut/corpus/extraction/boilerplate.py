"""Rules that find the parts of a web page that are not its main text, such as menus, comments and footers.

A rule looks for words in the classes and the id of an element. These names (classes and ids) are first split into
lower-case words: `navHeader`, `nav_header` and `nav-header` all become `nav header`.
"""

import re
from functools import lru_cache
from typing import NamedTuple

from crosscut.corpus.extraction.words import NAMES


class Rule(NamedTuple):
    """A kind of boilerplate, found by the words in the classes and the id of an element."""

    name: str

    words: str
    """Words and sequences of words, as a regular expression. At least one must occur in a class or in the id."""

    max_share: float = 0.3
    """Maximum share of the page's text that the element may have. A larger element probably contains the main text,
    whatever its classes and id are."""

    spares_prose: bool = False
    """Whether an element with a long text and few links is kept. Set for rules whose words also occur in the classes or
    ids of elements that contain articles."""

    keeps_names: bool = False
    """Whether an element that is not removed keeps its classes and id, so that resiliparse can judge the element by
    them."""


RULES = (
    # Discussions are often longer than the article itself.
    Rule(
        "comments",
        r"comments?|commentlist|comentarios?|kommentare?|commentaires?|disqus|livefyre|respond|responses|reblog|notes",
        max_share=0.8,
        keeps_names=True,
    ),
    # Menus, breadcrumbs, and links to the previous and the next page. DocBook calls a box in the text a sidebar.
    Rule(
        "navigation",
        r"nav|navbar|navigation|navheader|navfooter|menus?|breadcrumbs?|pager|pagination|paging|page links|prev"
        r"|previous|next|skip|sidebar|side column|rail|toolbar|topbar|site sub|site description|package header|tagline",
        spares_prose=True,
    ),
    # Owner, address, copyright and small print.
    Rule("footer", r"foot|footer|copyright|disclaimers?|legal|colophon|imprint|pie|piedipagina"),
    # Buttons that send the page to somebody.
    Rule("share", r"share|shares|sharing|socials?|addthis|sharedaddy|sociable|bookmarks?|follow", spares_prose=True),
    # Forms and requests: newsletters, accounts, donations.
    Rule(
        "request",
        r"newsletters?|mailing|email alerts?|subscribe|subscriptions?|sign ?up|login|log(?:ged)? ?(?:in|out)|register"
        r"|registration|opt ?in|cta|donate|donations?",
        spares_prose=True,
    ),
    # Other pages of the site or of advertisers. Their teasers are prose.
    Rule(
        "related",
        r"related|recommend(?:ed|ations?)?|popular|trending|most ?(?:read|viewed|popular)|read ?more"
        r"|more (?:from|stories)|also like|outbrain|taboola|promos?|promotions?|promoted|teasers?"
        r"|recent (?:posts|comments)|recently ?viewed|top stories|highly rated posts|recirc|recirculation|endslate"
        r"|suggested|similar|also bought|featured items|advert|adverts|advertisement|adsense|sponsor|sponsored|sponsors"
        r"|banners?",
    ),
    # Who wrote the article, at its end.
    Rule(
        "author",
        r"bios?|about (?:the )?author|author (?:bios?|profile|box|info|details|masthead|popup)|authorbox|contributors?"
        r"|article authors|post ?metadata",
    ),
    # Messages of the site or of the browser.
    Rule(
        "notice",
        r"cookies?|gdpr|consent|modal|popups?|dialog|overlay|lightbox|error message|no ?print|hideme",
        spares_prose=True,
    ),
    # Boxes that the software of a site adds to every page.
    Rule(
        "widget",
        r"(?<!elementor )widgets?|forum ?rules|quick ?reply|reply form|ratings?|post ratings",
        spares_prose=True,
    ),
)

FRAME = Rule("frame", "", keeps_names=True)
"""Rule for elements that are boilerplate by their tag or role."""

_WORDS = [(rule, re.compile(f" (?:{rule.words}) ")) for rule in RULES]
_ANY = re.compile(f" (?:{'|'.join(rule.words for rule in RULES)}) ")
_PHRASES = {phrase: rule for rule in reversed(RULES) for phrase in NAMES.get(rule.name, ())}
"""Words of other languages, and the rules that they belong to."""
_FIRST_WORDS = {phrase.split()[0] for phrase in _PHRASES}
_LONGEST_PHRASE = max(len(phrase.split()) for phrase in _PHRASES)
_CAMEL = re.compile(r"(?<=[a-z])(?=[A-Z])")
_SEPARATORS = re.compile(r"[\W_]+")
_STATES = re.compile(r" (?:has|with|no|without|is|js|hide|show) ")
"""Pattern for the beginning of a class that describes the state of an element, such as `has-sidebar`. Such a class does
not tell what the element is."""


@lru_cache(maxsize=1 << 16)
def find_rule(classes: str, identity: str) -> Rule | None:
    """Return the first rule whose words occur in the classes or the id of an element, or None."""
    for name in (*classes.split(), identity):
        words = f" {_SEPARATORS.sub(' ', _CAMEL.sub(' ', name)).lower().strip()} "
        if not _STATES.match(words) and (rule := _find(words)):
            return rule
    return None


def _find(words: str) -> Rule | None:
    if _ANY.search(words):
        return next(rule for rule, pattern in _WORDS if pattern.search(words))
    parts = words.split()
    for start in (number for number, part in enumerate(parts) if part in _FIRST_WORDS):
        for end in range(start + 1, min(start + _LONGEST_PHRASE, len(parts)) + 1):
            if rule := _PHRASES.get(" ".join(parts[start:end])):
                return rule
    return None
