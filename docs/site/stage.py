"""Lay out the site's pages for Sphinx: the repository's own Markdown, with links that work in the site.

The pages are written for readers of the repository and hold no directives. This module adds what the site needs: the
front page, a navigation, a page for each file of the repository that a page links to, and the reference.
"""

import os
import re
import shutil
import subprocess
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from reference import anchor_of, definitions, home_of, public_names, reference_pages

ROOT = Path(__file__).parents[2]
SPECIAL_PAGES = {
    "README.md": "overview",
    "docs/README.md": "index",
    "benchmarks/README.md": "benchmarks",
    "CHANGELOG.md": "changelog",
    "CONTRIBUTING.md": "contributing",
}
"""Pages of the site whose names are not those of their files in `docs/`."""
LISTED = {"decisions": "Decisions", "tables": "Tables"}
"""Folders of `docs/` whose pages are listed on a page of their own, with that page's title."""
PICTURES = {".png", ".svg"}
LANGUAGES = {".py": "python", ".sh": "sh", ".toml": "toml", ".yaml": "yaml", ".json": "json"}
LINK = re.compile(
    r"^(?P<indent> *)(?P<fence>```+)[^\n]*\n.*?^(?P=indent)(?P=fence) *$"  # a block of code
    r"|(?P<ticks>`+)(?!`).*?(?<!`)(?P=ticks)(?!`)"  # code in a line
    r"|\]\((?P<target>[^()\s]+)\)",
    re.MULTILINE | re.DOTALL,
)


def pages() -> dict[str, str]:
    """Path of each Markdown file in the repository that becomes a page of the site, with the page's name."""
    docs = ROOT / "docs"
    files = [*docs.glob("*.md"), *(path for folder in LISTED for path in (docs / folder).glob("*.md"))]
    named = {f"docs/{path}": path.removesuffix(".md") for path in sorted(str(file.relative_to(docs)) for file in files)}
    return named | SPECIAL_PAGES


class Stage:
    """Pages of the site, in memory, and the files of the repository that they link to."""

    def __init__(self) -> None:
        self.names = pages()
        self.texts: dict[str, str] = {}
        self.pictures: set[str] = set()
        self._wanted: list[str] = []

    def add_all(self) -> None:
        """Add every page, and then the files and folders that the pages link to."""
        for path, name in self.names.items():
            self.texts[name] = self.relinked((ROOT / path).read_text(encoding="utf-8"), path, name)
        self.texts["index"] = self._front_page()
        for folder, title in LISTED.items():
            self.texts[f"{folder}/index"] = f"# {title}\n\n{_toctree(self._pages_in(folder))}"
        self.texts |= reference_pages(ROOT)
        self._wanted += sorted({home_of(ROOT, *found) for found in _pairs(public_names(ROOT))})
        while self._wanted:
            self._add_source(self._wanted.pop())

    def write(self, folder: Path) -> None:
        """Write the pages and their pictures as Markdown files below an empty `folder`."""
        for name, text in self.texts.items():
            file = folder / f"{name}.md"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
        for picture in self.pictures:
            (folder / picture).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / picture, folder / picture)

    def relinked(self, text: str, path: str, name: str) -> str:
        """Return the text of the file `path` with its links rewritten for the page `name`."""

        def place(match: re.Match[str]) -> str:
            target = match["target"]
            if target is None or target.startswith("#") or "://" in target:
                return match[0]
            linked, hash_sign, anchor = target.partition("#")
            here = self._linked(os.path.normpath(Path(path).parent / linked), name)
            return f"]({here}{hash_sign}{anchor})"

        return LINK.sub(place, text)

    def _linked(self, path: str, name: str) -> str:
        """Link to a file or folder of the repository from the page `name`. The site has HTML files as they are, and
        `conf.py` gives such a link its address.
        """
        scheme = "site:" if Path(path).suffix == ".html" else ""
        return scheme + os.path.relpath(self._staged(path), Path(name).parent)

    def _staged(self, linked: str) -> str:
        """Staged file of a file or folder of the repository. Sphinx warns of a file that does not exist."""
        if linked in self.names:
            return f"{self.names[linked]}.md"
        if linked.removeprefix("docs/") in LISTED:
            return f"{linked.removeprefix('docs/')}/index.md"
        if not (ROOT / linked).exists():
            return linked
        if Path(linked).suffix == ".html":
            return Path(linked).name
        if Path(linked).suffix in PICTURES:
            self.pictures.add(linked)
            return linked
        self._wanted.append(linked)
        return f"source/{linked}.md"

    def _add_source(self, path: str) -> None:
        """Add the page that shows a file or lists a folder of the repository."""
        name, file = f"source/{path}", ROOT / path
        if name in self.texts:
            return
        if file.is_dir():
            entries = sorted({tracked.relative_to(path).parts[0] for tracked in _tracked(path)})
            body = "\n".join(f"- [{entry}]({self._linked(f'{path}/{entry}', name)})" for entry in entries)
        else:
            body = _source(file.read_text(encoding="utf-8"), path)
        self.texts[name] = f"---\norphan: true\nnosearch: true\n---\n\n# `{path}`\n\n{body}\n"

    def _front_page(self) -> str:
        """First page: what Crosscut is, the paths for its readers, the cut, the index of all pages, the navigation."""
        readme = (ROOT / "README.md").read_text(encoding="utf-8").partition("\n## ")[0]
        head, blank, cut = self.relinked(readme, "README.md", "index").partition("\n\n!")
        _, paths, *others = self.texts["index"].split("\n## ")
        trees = [_toctree(names, f":hidden:\n:caption: {caption}") for caption, names in navigation().items()]
        sections = "\n## ".join([head + "\n", paths, "One layer on two ranks" + blank + cut + "\n", *others])
        return "\n\n".join([sections, *trees]) + "\n"

    def _pages_in(self, folder: str) -> list[str]:
        return sorted(name.removeprefix(f"{folder}/") for name in self.texts if name.startswith(f"{folder}/"))


def navigation() -> Mapping[str, list[str]]:
    """Names of the pages beside every page, by caption."""
    return tomllib.loads((Path(__file__).parent / "navigation.toml").read_text(encoding="utf-8"))


def _toctree(names: Iterable[str], options: str = ":maxdepth: 1") -> str:
    return "\n".join(["```{toctree}", options, ":titlesonly:", "", *names, "```"])


def _tracked(folder: str) -> list[Path]:
    """Files of a folder of the repository that git tracks. Others are nobody's business."""
    command = ["git", "ls-files", "-z", "--", folder]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout  # noqa: S603
    return [Path(name) for name in listed.split("\0") if name]


def _source(text: str, path: str) -> str:
    """Text of a source file as blocks of code with line numbers. An anchor stands before each public name of Python."""
    lines, suffix = text.rstrip().splitlines(), Path(path).suffix
    found = definitions(text) if suffix == ".py" else {}
    anchors = {first - 1: f"({anchor_of(path, name)})=\n" for name, first in found.items()}
    starts = sorted({0, *anchors})
    blocks = (
        anchors.get(start, "") + _listing(lines[start:end], LANGUAGES.get(suffix, "text"), start + 1)
        for start, end in zip(starts, [*starts[1:], len(lines)], strict=True)
    )
    return "\n\n".join(blocks)


def _listing(lines: list[str], language: str, first: int) -> str:
    text = "\n".join(lines).rstrip()
    fence = "`" * max(3, *(1 + len(run) for run in re.findall("`+", text)), 0)
    return f"{fence}{{code-block}} {language}\n:lineno-start: {first}\n\n{text}\n{fence}"


def _pairs(names: Mapping[str, list[str]]) -> Iterator[tuple[str, str]]:
    for module, found in names.items():
        yield from ((module, name) for name in found)
