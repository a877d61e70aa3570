"""The list of pages is well-formed, and its halves share no site."""

import re
from collections import Counter

from benchmarks.corpus.extraction.pages import HALVES, REGISTRIES, read_expected, read_pages

PAGES = read_pages()


def test_ids_are_unique_file_names() -> None:
    ids = [page.id for page in PAGES]
    assert [name for name, count in Counter(ids).items() if count > 1] == []
    assert [name for name in ids if not re.fullmatch(r"[a-z0-9][a-z0-9.-]*", name)] == []


def test_hashes_are_sha256_and_no_page_stands_twice() -> None:
    hashes = [page.sha256 for page in PAGES]
    assert [text for text in hashes if not re.fullmatch(r"[0-9a-f]{64}", text)] == []
    assert len(set(hashes)) == len(hashes)
    assert len({(page.archive, page.path) for page in PAGES}) == len(PAGES)


def test_halves_share_no_site_and_are_large_about_equal_and_diverse() -> None:
    work, held = ([page for page in PAGES if page.half == half] for half in HALVES)
    assert len(work) + len(held) == len(PAGES)
    assert {page.site for page in work} & {page.site for page in held} == set()
    assert min(len(work), len(held)) >= 170
    assert abs(len(work) - len(held)) <= 0.05 * len(PAGES)
    sites = Counter(page.site for page in PAGES)
    assert len(sites) >= 40 and max(sites.values()) <= 12
    assert sum(page.kind == "documentation" for page in PAGES) <= 0.4 * len(PAGES)


def test_ten_languages_besides_english_are_in_both_halves() -> None:
    counts = Counter((page.language, page.half) for page in PAGES)
    languages = ["de", "es", "fr", "hu", "it", "ja", "pl", "pt", "ru", "zh"]
    assert all(counts[language, half] >= 2 for language in languages for half in HALVES)
    assert sum(page.language in languages for page in PAGES) >= 250


def test_an_archive_belongs_to_one_version_of_a_known_registry() -> None:
    origins = {(page.archive, page.registry, page.package, page.version) for page in PAGES}
    assert len({archive for archive, *_ in origins}) == len(origins)
    assert {page.registry for page in PAGES} == set(REGISTRIES)


def test_every_page_has_expected_strings() -> None:
    expected = read_expected()
    assert list(expected) == [page.id for page in PAGES]
    for one in expected.values():
        assert 3 <= len(one.keep) <= 6 and len(one.drop) <= 6, one.id
        strings = one.keep + one.drop
        assert all(text and text == " ".join(text.split()) for text in strings), one.id
        assert [a for a in strings for b in strings if a is not b and a in b] == [], one.id
