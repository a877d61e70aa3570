"""The site that is built from docs/: its links, its navigation, and the names in its reference."""

import ast
import os
import re
import subprocess
import sys
from collections import Counter
from html.parser import HTMLParser
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

from tests.docs.conftest import DOCS, load_program
from tests.docs.test_code_blocks import PAGES, ROOT, python_blocks

sys.path.insert(0, str(DOCS / "site"))
site = load_program("site/stage")
sys.path.pop(0)


@pytest.fixture(scope="module")
def staged() -> Any:
    stage = site.Stage()
    stage.add_all()
    return stage


def names_that_docs_import() -> set[str]:
    programs = [block.code for page in PAGES for block in python_blocks(page.read_text(encoding="utf-8"))]
    programs += [file.read_text(encoding="utf-8") for file in (ROOT / "examples").rglob("*.py")]
    return {
        f"{node.module}.{alias.name}"
        for program in programs
        for node in ast.walk(ast.parse(program))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("crosscut")
        for alias in node.names
    }


def test_every_page_stands_once_in_the_navigation(staged: Any) -> None:
    shown = Counter(re.sub(r".*<(.+)>$", r"\1", entry) for names in site.navigation().values() for entry in names)
    lists = ("tables/index", "decisions/index", "reference/index")
    below = {name for name in staged.texts if name.startswith(("tables/", "decisions/", "reference/", "source/"))}
    assert shown == Counter((staged.texts.keys() - below - {"index"}) | set(lists))
    for name in below - set(lists):
        folder, _, page = name.partition("/")
        assert folder == "source" or page in staged.texts[f"{folder}/index"].splitlines()


def test_a_folder_lists_what_git_tracks_and_no_other_file(staged: Any) -> None:
    listed = set(re.findall(r"^- \[(.+?)\]", staged.texts["source/examples/paper"], re.MULTILINE))
    assert "prompts.txt" in listed
    stray = ROOT / "examples" / "paper" / "stray.note"
    stray.touch()
    try:
        again = site.Stage()
        again.add_all()
    finally:
        stray.unlink()
    assert again.texts == staged.texts


def test_a_folder_of_other_files_is_not_built_in(tmp_path: Path) -> None:
    (tmp_path / "html").mkdir()
    (tmp_path / "html" / "index.html").touch()
    ended = subprocess.run(
        [sys.executable, DOCS / "site" / "build.py", tmp_path], capture_output=True, text=True, check=False
    )
    assert (ended.returncode, (tmp_path / "html" / "index.html").exists()) == (2, True)
    assert "must be new or empty" in ended.stderr


def test_every_link_to_a_file_leads_to_a_page_or_a_picture(staged: Any) -> None:
    known = {f"{name}.md" for name in staged.texts} | staged.pictures
    for name, text in staged.texts.items():
        for match in site.LINK.finditer(text):
            target = (match["target"] or "").partition("#")[0]
            if target.startswith("site:"):
                page = os.path.normpath(Path(name).parent / target.removeprefix("site:"))
                assert (DOCS / page).is_file(), f"{name}: {target}"
            elif target and "://" not in target:
                assert os.path.normpath(Path(name).parent / target) in known, f"{name}: {target}"


@pytest.mark.parametrize(
    ("path", "name", "link", "rewritten"),
    [
        ("docs/tour.md", "tour", "[p](paper.md#f)", "[p](paper.md#f)"),
        ("README.md", "overview", "[p](docs/paper.md)", "[p](paper.md)"),
        (
            "docs/decisions/0006-random-streams.md",
            "decisions/0006",
            "[s](../../README.md#start)",
            "[s](../overview.md#start)",
        ),
        ("docs/README.md", "index", "[d](decisions)", "[d](decisions/index.md)"),
        ("docs/README.md", "index", "[e](../examples/paper)", "[e](source/examples/paper.md)"),
        ("docs/tour.md", "tour", "[c](../Makefile)", "[c](source/Makefile.md)"),
        ("docs/tour.md", "tour", "![c](cut.svg)", "![c](docs/cut.svg)"),
        ("docs/tour.md", "tour", "[a](https://arxiv.org/abs/1)", "[a](https://arxiv.org/abs/1)"),
        ("docs/tour.md", "tour", "[h](#start)", "[h](#start)"),
        ("docs/paper.md", "paper", "[f](alive.html#cut)", "[f](site:alive.html#cut)"),
        ("docs/decisions/0006-random-streams.md", "decisions/0006", "[f](../alive.html)", "[f](site:../alive.html)"),
        ("docs/tour.md", "tour", "`x[0](paper.md)`", "`x[0](paper.md)`"),
        ("docs/tour.md", "tour", "```python\nx[0](../Makefile)\n```", "```python\nx[0](../Makefile)\n```"),
    ],
)
def test_links_of_the_repository_become_links_of_the_site(path: str, name: str, link: str, rewritten: str) -> None:
    assert site.Stage().relinked(link, path, name) == rewritten


class _References(HTMLParser):
    """Anchors of a page, its links, and the addresses that a browser fetches with it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.fetched: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        found = {name: value for name, value in attributes if value}
        self.anchors.add(found.get("id", ""))
        if tag == "a" and "href" in found:
            self.links.append(found["href"])
        elif tag != "a":
            self.fetched += [found[name] for name in ("href", "src", "srcset", "data") if name in found]


@pytest.mark.slow  # a minute; the quick tests above find a page that the navigation lacks and a link to no file
@pytest.mark.timeout(900)
@pytest.mark.skipif(find_spec("sphinx") is None, reason="Sphinx is not installed; it is in the extra `dev`")
def test_the_site_is_whole_and_needs_no_network(tmp_path: Path, browser: Any) -> None:
    build = [sys.executable, str(DOCS / "site" / "build.py"), str(tmp_path)]
    done = subprocess.run(build, cwd=ROOT, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stderr
    html = tmp_path / "html"
    pages = {page: _References(page.read_text(encoding="utf-8")) for page in html.rglob("*.html")}
    for page, references in pages.items():
        fetched = [address for address in references.fetched if not address.startswith("data:")]
        assert [address for address in fetched if urlsplit(address).netloc] == [], page
        for address in (*references.links, *fetched):
            parts = urlsplit(address)
            if parts.scheme or parts.netloc:
                continue
            target = (page.parent / unquote(parts.path)).resolve() if parts.path else page
            assert target.is_file(), f"{page}: {address}"
            if parts.fragment and target in pages:
                assert unquote(parts.fragment) in pages[target].anchors, f"{page}: {address}"
    styles = "".join(style.read_text(encoding="utf-8") for style in html.rglob("*.css"))
    assert re.findall(r"(?:url\(|@import)\s*[\"']?(?:https?:)?//[^)]*", styles) == []
    inventory = _documented(html)
    assert names_that_docs_import() - inventory == set()
    assert _found_by_search(browser, html, "ColumnParallelLinear")


def _documented(html: Path) -> set[str]:
    from sphinx.util.inventory import InventoryFile

    inventory = InventoryFile.loads((html / "objects.inv").read_bytes(), uri="")
    return {name for kind in inventory.data if kind.startswith("py:") for name in inventory.data[kind]}


def _found_by_search(browser: Any, html: Path, word: str) -> list[str]:
    """Pages that the search finds in the files as they lie on the disk, without a server."""
    page = browser.new_page()
    page.goto(f"{(html / 'search.html').as_uri()}?q={word}")
    page.wait_for_selector("ul.search li a")
    return [link.get_attribute("href") for link in page.query_selector_all("ul.search li a")]
