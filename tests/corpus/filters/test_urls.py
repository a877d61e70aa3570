"""Documents go by host, file type and karma; spellings of a URL are told to be one."""

from pathlib import Path

import pytest

from crosscut.config import DataError
from crosscut.config.corpora import UrlsConfig
from crosscut.corpus.documents import Document, Drop
from crosscut.corpus.filters.urls import BUILTIN_LISTS, UrlFilter, canonical_url
from tests.refusals import refusal


def judge(*urls: str, karma: float | None = None, **config: object) -> list[Drop]:
    documents = [Document(row, f"s/f#{row}", "text", url, karma) for row, url in enumerate(urls)]
    return list(UrlFilter(UrlsConfig(**config))(documents).drops)


@pytest.mark.parametrize(
    "url",
    [
        "http://example.com/page",
        "https://EXAMPLE.com",
        "example.com/page",
        "//example.com/",
        "https://a.b.example.com/page?q=1",
        "https://example.com.:8443/page",
        "ftp://user:password@www.example.com:21/",
        "https://user@example.com@example.com/",
        "https://%65xample.com/",
    ],
)
def test_a_listed_domain_takes_its_subdomains_however_it_is_written(url: str, tmp_path: Path) -> None:
    listed = tmp_path / "domains"
    listed.write_text("# mine\n\n*.Example.com   # with all below\n")
    assert judge(url, domains=(str(listed),)) == [Drop(0, "domain", "example.com")]


@pytest.mark.parametrize(
    "url",
    ["https://notexample.com/", "https://example.com.evil.org/", "https://other.org/?u=https://example.com/", "", "??"],
)
def test_other_domains_pass(url: str, tmp_path: Path) -> None:
    listed = tmp_path / "domains"
    listed.write_text("example.com\n")
    assert judge(url, domains=(str(listed),)) == []


def test_a_comment_of_a_list_ends_with_its_line(tmp_path: Path) -> None:
    listed = tmp_path / "domains"
    listed.write_text("# not\u2028other.org\nexample.com\n", encoding="utf-8")
    assert judge("https://other.org/", domains=(str(listed),)) == []


def test_domains_are_compared_as_they_travel(tmp_path: Path) -> None:
    listed = tmp_path / "domains"
    listed.write_text("b\u00fccher.example\n", encoding="utf-8")
    for url in ("https://b\u00fccher.example/", "https://www.B\u00dcCHER.example/", "https://xn--bcher-kva.example/"):
        assert judge(url, domains=(str(listed),)) == [Drop(0, "domain", "xn--bcher-kva.example")]
    endless = "https://" + "\u00fc" * 100 + ".example/"  # longer than a name may be
    assert judge(endless, domains=(str(listed),)) == []


@pytest.mark.parametrize("url", ["http://a.org/x.JPG", "a.org/x.y.jpg?size=1#top", "a.org/x%2Ejpg", "a.org/x.jpg;id=1"])
def test_a_listed_type_is_told_by_the_path(url: str) -> None:
    assert judge(url) == [Drop(0, "file type", "jpg")]


@pytest.mark.parametrize("url", ["http://a.org/?f=x.jpg", "http://jpg", "http://a.org/jpg", "http://a.org/x.jpg/page"])
def test_other_types_pass(url: str) -> None:
    assert judge(url) == []


def test_types_of_two_suffixes_and_with_a_dot(tmp_path: Path) -> None:
    listed = tmp_path / "types"
    listed.write_text(".tar.zst\n*.LOG\n")
    urls = ("a.org/x.tar.zst", "a.org/x.zst", "a.org/x.log")
    drops = judge(*urls, types=(str(listed),))
    assert drops == [Drop(0, "file type", "tar.zst"), Drop(2, "file type", "log")]


def test_karma_counts_only_where_it_is_known() -> None:
    assert judge("a.org", karma=2.0) == [Drop(0, "karma", "2")]
    assert judge("", karma=-1.5) == [Drop(0, "karma", "-1.5")]
    assert judge("a.org", karma=3.0) == judge("a.org") == []
    assert judge("a.org", karma=1.0, min_karma=1.0) == []


def test_the_first_rule_is_told() -> None:
    assert judge("https://i.imgur.com/x.jpg", karma=0.0) == [Drop(0, "domain", "imgur.com")]


def test_empty_lists_drop_nothing() -> None:
    assert judge("https://imgur.com/x.jpg", domains=(), types=()) == []


@pytest.mark.parametrize("name", sorted(BUILTIN_LISTS))
def test_builtin_lists_hold_each_entry_once(name: str) -> None:
    lines = BUILTIN_LISTS[name].read_text(encoding="utf-8").splitlines()
    entries = [line for line in lines if line and not line.startswith("#")]
    assert len(entries) == len(set(entries)) > 40
    field = name.partition(":")[2]
    assert UrlFilter(UrlsConfig()).settings[field] == sorted(entries)


def test_settings_follow_the_contents_of_the_lists(tmp_path: Path) -> None:
    listed = tmp_path / "domains"
    listed.write_text("example.com\n")
    config = UrlsConfig(domains=(str(listed),), types=(), min_karma=1)
    assert UrlFilter(config).settings == {"domains": ["example.com"], "types": [], "min_karma": 1}


@pytest.mark.parametrize(
    ("field", "content", "message"),
    [
        ("domains", None, "`urls.domains` must name readable files, but `{file}` cannot be read: No such file or"),
        (
            "types",
            b"\xff",
            "`urls.types` must name readable files, but `{file}` cannot be read: the file is not UTF-8",
        ),
        ("domains", b"a.org\nhttp://b.org/\n", "`{file}`, line 2, must be a domain such as `example.com`, but is"),
        ("types", b"image/jpeg", "`{file}`, line 1, must be a file type such as `jpg`, but is `image/jpeg`."),
    ],
)
def test_lists_that_are_none_are_told(tmp_path: Path, field: str, content: bytes | None, message: str) -> None:
    file = tmp_path / "list"
    if content is not None:
        file.write_bytes(content)
    assert refusal(DataError, UrlFilter, UrlsConfig(**{field: (str(file),)})).startswith(message.format(file=file))


def test_unknown_builtin_list_is_told() -> None:
    told = refusal(DataError, UrlFilter, UrlsConfig(domains=("builtin:x",)))
    assert "built-in lists (`builtin:domains` and `builtin:types`), but names `builtin:x`" in told


@pytest.mark.parametrize(
    "spellings",
    [
        (
            "http://example.com",
            "https://www.example.com/",
            "HTTPS://WWW.Example.COM:443/#top",
            "http://user:pw@example.com:80?",
            "//example.com?utm_source=x&UTM_Medium=y&fbclid=z",
            " example.com. ",
        ),
        ("http://a.org/p?b=2&a=1", "a.org/p/?a=1&b=2&gclid=3", "https://a.org/p?a=1&&b=2"),
        ("http://a.org/%7euser/caf%c3%a9", "http://a.org/~user/caf\u00e9/"),
        ("http://a.org:8080/", "https://a.org:8080"),
        ("http://b\u00fccher.example/", "http://xn--bcher-kva.example"),
    ],
)
def test_spellings_of_one_url(spellings: tuple[str, ...]) -> None:
    assert len({canonical_url(url) for url in spellings}) == 1


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("http://a.org/x", "http://a.org/X"),
        ("http://a.org/x?id=1", "http://a.org/x?id=2"),
        ("http://a.org/x", "http://a.org:8080/x"),
        ("http://a.org:443/", "http://a.org/"),  # not the port of http
        ("http://a.org/a%2Fb", "http://a.org/a/b"),
        ("http://a.org/#!one", "http://a.org/#!two"),
        ("http://www.com/", "http://com/"),
        ("http://a.org/?ref=1", "http://a.org/"),
    ],
)
def test_different_urls_stay_apart(one: str, other: str) -> None:
    assert canonical_url(one) != canonical_url(other)


def test_what_is_no_url_has_a_spelling_too_and_passes() -> None:
    urls = ["http://[", "http://a.org:99999999/", "http://\udcff/\udcff", "::::"]
    assert len({canonical_url(url) for url in urls}) == len(urls)
    assert judge("", "\u2028", *urls) == []
