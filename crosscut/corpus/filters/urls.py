"""Drop documents by URL: unwanted hosts, files that are not text, links with few votes, and repeated URLs.

Karma is the number of votes for the link to a document. Documents without a URL pass all rules about URLs, and
documents without karma pass the rule about karma.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from urllib.parse import quote, unquote, urlsplit

from crosscut.config.corpora import UrlsConfig
from crosscut.config.errors import DataError
from crosscut.config.system.files import require_regular
from crosscut.corpus.documents import Document, Drop, Judgement
from crosscut.data.text.lines import lines_of

BUILTIN_LISTS = {f"builtin:{path.stem}": path for path in (Path(__file__).parents[1] / "lists").glob("*.txt")}
"""Lists that come with Crosscut. The keys are the names for use in a config, and the values are the paths of the
files."""

TRACKING = re.compile(
    r"utm_\w+|_ga|_gl|fbclid|gclid|gclsrc|dclid|gbraid|wbraid|msclkid|yclid|twclid|ttclid|igshid|igsh|mc_[ce]id|"
    r"mkt_tok|_hsenc|_hsmi|oly_(?:anon|enc)_id|vero_id|ref_src|spm"
)
"""Pattern for the names of query parameters that only track visitors and do not change the page."""

_ABSOLUTE = re.compile(r"(?:[A-Za-z][A-Za-z0-9+.-]*:)?//")
_DOMAIN = re.compile(r"[a-z0-9_-]+(?:\.[a-z0-9_-]+)*")
_TYPE = re.compile(r"[^\s/.?#]+(?:\.[^\s/.?#]+)*")
_ESCAPE = re.compile(r"%([0-9A-Fa-f]{2})")
_UNRESERVED = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-._~")
_DEFAULT_PORTS = {"http": (80,), "https": (443,), "": (80, 443)}


class UrlFilter:
    """Filter that drops documents by the host and the file type of their URL, and by their karma (number of votes).

    The rules are `domain`, `file type` and `karma`. A listed domain includes its subdomains. The constructor checks the
    config before a run: it raises `DataError` if a list cannot be read or has an invalid entry.
    """

    def __init__(self, config: UrlsConfig) -> None:
        self._domains = _entries("urls.domains", config.domains, _as_domain)
        self._types = _entries("urls.types", config.types, _as_type)
        self._min_karma = config.min_karma

    @property
    def settings(self) -> dict[str, object]:
        """Settings on which the result depends, as JSON values. A list is given by its content, not by its path."""
        return {**self.lists, "min_karma": self._min_karma}

    @property
    def lists(self) -> dict[str, object]:
        """Settings on which the rules about URLs depend, as JSON values."""
        return {"domains": sorted(self._domains), "types": sorted(self._types)}

    def __call__(self, documents: Sequence[Document]) -> Judgement:
        """Drop documents that break a rule. The first rule that a document breaks becomes the reason."""
        drops = (self._judge(document) for document in documents)
        return Judgement(drops=[drop for drop in drops if drop is not None])

    def find_rule(self, url: str) -> tuple[str, str] | None:
        """Return the first rule that a URL breaks (`domain` or `file type`), and the matching entry of the rule's list.
        Returns None if the URL breaks no rule.
        """
        if not url:
            return None
        _, authority, path, _, _ = _split(url)
        for domain in _tails(_host_and_port(authority)[0]):
            if domain in self._domains:
                return "domain", domain
        for suffix in _tails(_file_name(path))[1:]:
            if suffix in self._types:
                return "file type", suffix
        return None

    def _judge(self, document: Document) -> Drop | None:
        if broken := self.find_rule(document.url):
            return Drop(document.row, *broken)
        if document.karma is not None and document.karma < self._min_karma:
            return Drop(document.row, "karma", f"{document.karma:g}")
        return None


def url_key(document: Document) -> str:
    """Key of a document, the same for all spellings of its URL. The key is empty for a document without a URL."""
    return canonical_url(document.url) if document.url else ""


def canonical_url(url: str) -> str:
    """Convert a URL to its canonical spelling. URLs with the same canonical spelling lead to the same page.

    The result has no scheme, user, `www.`, default port, fragment, final slash, or parameters that only track visitors
    (`TRACKING`). Only a fragment that begins with `#!` stays, because it names a page. The host is in lower case and
    ASCII. The parameters are in alphabetical order. Only characters that must be escaped are escaped.
    """
    scheme, authority, path, query, fragment = _split(url)
    host, port = _host_and_port(authority)
    if host.startswith("www.") and host.count(".") > 1:
        host = host.removeprefix("www.")
    if port is not None and port not in _DEFAULT_PORTS.get(scheme, ()):
        host = f"{host}:{port}"
    parameters = sorted(
        _escaped(part) for part in query.split("&") if part and not TRACKING.fullmatch(part.partition("=")[0].lower())
    )
    canonical = host + _escaped(path).rstrip("/")
    if parameters:
        canonical += "?" + "&".join(parameters)
    return canonical + (f"#{_escaped(fragment)}" if fragment.startswith("!") else "")


def _split(url: str) -> tuple[str, str, str, str, str]:
    """Split a URL into scheme, authority, path, query and fragment. A text that is not a URL becomes the path."""
    url = url.strip()
    if not _ABSOLUTE.match(url):
        url = f"//{url}"
    try:
        parts = urlsplit(url)
    except ValueError:  # for example brackets without an IP address
        return "", "", url, "", ""
    return parts.scheme.lower(), parts.netloc, parts.path, parts.query, parts.fragment


def _host_and_port(authority: str) -> tuple[str, int | None]:
    host = authority.rpartition("@")[2]
    port = None
    if match := re.fullmatch(r"(.*):([0-9]{0,5})", host):
        host, port = match[1], int(match[2]) if match[2] else None
    return _ascii_host(unquote(host)), port


def _ascii_host(host: str) -> str:
    host = host.lower().strip(".")
    if host.isascii():
        return host
    try:
        return host.encode("idna").decode("ascii")
    except UnicodeError:
        return host


def _file_name(path: str) -> str:
    """The last segment of a path, without parameters such as `;jsessionid=...`."""
    return unquote(path).rpartition("/")[2].partition(";")[0].strip().lower()


def _tails(name: str) -> list[str]:
    """Return a dotted name and the text after each of its dots: `a.b.c`, `b.c`, `c`."""
    parts = name.split(".")
    return [".".join(parts[start:]) for start in range(len(parts))]


def _escaped(text: str) -> str:
    """Normalise the escapes of a text: escape every character that must be escaped, and undo all other escapes."""

    def restore(match: re.Match[str]) -> str:
        character = chr(int(match[1], 16))
        return character if character in _UNRESERVED else match[0].upper()

    return quote(_ESCAPE.sub(restore, text), safe="%/:=&?@!$'()*+,;~", errors="replace")


def _as_domain(entry: str) -> str | None:
    domain = _ascii_host(entry.removeprefix("*."))
    return domain if _DOMAIN.fullmatch(domain) else None


def _as_type(entry: str) -> str | None:
    suffix = entry.removeprefix("*").removeprefix(".").lower()
    return suffix if _TYPE.fullmatch(suffix) else None


def _entries(name: str, lists: Sequence[str], read: Callable[[str], str | None]) -> frozenset[str]:
    """Read the entries of list files, one entry per line. Text after a `#` is a comment."""
    entries: set[str] = set()
    for file in lists:
        for number, line in enumerate(_lines(name, file), start=1):
            if not (entry := line.partition("#")[0].strip()):
                continue
            if (taken := read(entry)) is None:
                example = "a domain such as `example.com`" if read is _as_domain else "a file type such as `jpg`"
                raise DataError(
                    f"`{file}`, line {number}, must be {example}, but is `{entry}`. Correct the line, or remove the "
                    f"file from `{name}`."
                )
            entries.add(taken)
    return frozenset(entries)


def _lines(name: str, file: str) -> list[str]:
    if file.startswith("builtin:") and file not in BUILTIN_LISTS:
        known = " and ".join(f"`{builtin}`" for builtin in sorted(BUILTIN_LISTS))
        raise DataError(
            f"`{name}` must name files or built-in lists ({known}), but names `{file}`. Correct the name of the list."
        )
    path = BUILTIN_LISTS.get(file, Path(file))
    try:
        require_regular(path)
        return lines_of(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "the file is not UTF-8"
        raise DataError(
            f"`{name}` must name readable files, but `{file}` cannot be read: {reason}. Check the path and the file."
        ) from None
