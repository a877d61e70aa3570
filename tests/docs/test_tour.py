"""docs/tour.md names the files and functions of today's code, and its excerpts are lines of them."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "tour.md"

LINK = re.compile(r"\[`([\w.]+)`\]\(\.\./([\w/]+\.py)\)")
FILE = re.compile(r"\w[\w/]*\.py\b")
WORD = re.compile(r"`([A-Za-z_][\w.]*)(?:\(\))?`")
STEP = re.compile(r"^## (\d)\. .*$", re.MULTILINE)
EXCERPT = re.compile(r"<!-- not run: an excerpt of ([\w/]+\.py) -->\n```python\n(.*?)```", re.DOTALL)
FENCE = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)


def definitions(body: list[ast.stmt], prefix: str = "") -> Iterator[str]:
    """Names of functions, classes, their members and module variables, such as `Trainer.step`."""
    for node in body:
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield prefix + name
            case ast.ClassDef(name=name):
                yield prefix + name
                yield from definitions(node.body, f"{prefix}{name}.")
            case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
                yield prefix + name


@cache
def tree(path: Path) -> ast.Module:
    """Syntax tree of a file; an empty one if the file does not exist."""
    return ast.parse(path.read_text(encoding="utf-8") if path.is_file() else "")


@cache
def names_defined_in(path: Path) -> frozenset[str]:
    return frozenset(definitions(tree(path).body))


@cache
def words_used_in(path: Path) -> frozenset[str]:
    """Identifiers of a file: variables, attributes, parameters, and the names that it defines."""
    words = set()
    for node in ast.walk(tree(path)):
        for field in ("id", "attr", "arg", "name"):
            word = getattr(node, field, None)
            words |= {word} if isinstance(word, str) else set()
    return frozenset(words)


def places_of(name: str) -> str:
    """Files of the package that define a name, for the message of a name that has moved."""
    word = name.partition(".")[0]
    mentions = (path for path in sorted((ROOT / "crosscut").rglob("*.py")) if word in path.read_text(encoding="utf-8"))
    files = [path for path in mentions if name in names_defined_in(path)]
    return ", ".join(str(path.relative_to(ROOT)) for path in files) or "no file"


def mistakes(page: str) -> list[str]:
    """Files, names and lines of a page that the code does not have."""
    linked = [(name, ROOT / file) for name, file in LINK.findall(page)]
    known = {word for _, path in linked for word in words_used_in(path)}
    words = dict.fromkeys(WORD.findall(FENCE.sub("", LINK.sub("", page))))
    excerpts = [(file, code) for file, code in EXCERPT.findall(page) if (ROOT / file).is_file()]
    return [
        *(f"{file} does not exist" for file in dict.fromkeys(FILE.findall(page)) if not (ROOT / file).is_file()),
        *(
            f"{name} is not in {path.relative_to(ROOT)}, but in {places_of(name)}"
            for name, path in linked
            if name not in names_defined_in(path)
        ),
        *(
            f"the excerpt is not in {file}: {code.strip()}"
            for file, code in excerpts
            if not is_excerpt(code, (ROOT / file).read_text(encoding="utf-8"))
        ),
        *(f"{word} occurs in no file that the page names" for word in words if word.rpartition(".")[2] not in known),
    ]


def is_excerpt(code: str, text: str) -> bool:
    """Whether the lines of `code` follow one another in `text`, whatever their indentation."""
    lines = [line.strip() for line in code.strip().splitlines()]
    others = [line.strip() for line in text.splitlines()]
    return any(others[i : i + len(lines)] == lines for i in range(len(others)))


def steps(page: str) -> dict[int, str]:
    """Text of each step by its number, up to the next heading."""
    found = list(STEP.finditer(page))
    return {int(step.group(1)): page[step.end() :].partition("\n## ")[0] for step in found}


def test_the_page_names_only_what_the_code_has() -> None:
    assert mistakes(PAGE.read_text(encoding="utf-8")) == []


def test_there_are_eight_steps_and_each_names_where_it_happens() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert len(STEP.findall(page)) == 8
    assert sorted(steps(page)) == list(range(1, 9))
    assert [number for number, text in steps(page).items() if not LINK.search(text)] == []


def test_both_excerpts_are_compared_with_the_code() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert len(EXCERPT.findall(page)) == page.count("<!-- not run: an excerpt") == 2


@pytest.mark.parametrize("page", [ROOT / "README.md", ROOT / "CONTRIBUTING.md"], ids=lambda page: page.name)
def test_the_front_pages_link_to_the_tour(page: Path) -> None:
    assert "](docs/tour.md)" in page.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("page", "found"),
    [
        (
            "[`Block`](../crosscut/model/moved.py)",
            [
                "crosscut/model/moved.py does not exist",
                "Block is not in crosscut/model/moved.py, but in crosscut/model/block.py",
            ],
        ),
        (
            "[`Block`](../crosscut/model/sublayers/mlp.py)",
            ["Block is not in crosscut/model/sublayers/mlp.py, but in crosscut/model/block.py"],
        ),
        (
            "[`Block.backward`](../crosscut/model/block.py)",
            ["Block.backward is not in crosscut/model/block.py, but in no file"],
        ),
        (
            "[`Block`](../crosscut/model/block.py) has `no_such_word`",
            ["no_such_word occurs in no file that the page names"],
        ),
        (
            "<!-- not run: an excerpt of crosscut/model/block.py -->\n```python\nx = 1\n```\n",
            ["the excerpt is not in crosscut/model/block.py: x = 1"],
        ),
    ],
)
def test_what_has_moved_is_named(page: str, found: list[str]) -> None:
    assert mistakes(page) == found
