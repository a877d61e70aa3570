"""Every ```python block of the README and the pages under docs/ runs, each page's blocks in order in one namespace.

A block that cannot run here has `<!-- not run: reason -->` on the line before it.
"""

import re
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [page for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))) if page.is_file()]

FENCE = re.compile(r"^( *)```python *$")
NOT_RUN = re.compile(r"^<!-- not run:\s*(.*?)\s*-->$")


@dataclass(frozen=True)
class Block:
    line: int
    """The line of the page on which the code starts, from 1."""

    code: str

    reason: str | None
    """Why it is not run; None where it is, empty where the mark gives no reason."""


def python_blocks(text: str) -> list[Block]:
    lines = text.splitlines()
    blocks = []
    for number, line in enumerate(lines):
        if fence := FENCE.match(line):
            indent = fence.group(1)
            end = next(i for i in range(number + 1, len(lines)) if lines[i].strip() == "```")
            code = "\n".join(lines[i].removeprefix(indent) for i in range(number + 1, end))
            mark = NOT_RUN.match(lines[number - 1].strip()) if number else None
            blocks.append(Block(number + 2, code, mark.group(1) if mark else None))
    return blocks


def run_blocks(blocks: list[Block], name: str) -> dict[str, object]:
    """Run those that are not marked; a traceback shows the page's own lines."""
    namespace: dict[str, object] = {"__name__": "__main__"}
    for block in blocks:
        if block.reason is None:
            padding = "\n" * (block.line - 1)
            exec(compile(padding + block.code, name, "exec"), namespace)
    return namespace


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_python_blocks_of_a_page_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = python_blocks(page.read_text(encoding="utf-8"))
    if not blocks:
        pytest.skip("the page has no python block")
    monkeypatch.chdir(tmp_path)  # what a block writes does not land in the repository
    run_blocks(blocks, str(page))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_block_that_is_not_run_says_why(page: Path) -> None:
    blocks = python_blocks(page.read_text(encoding="utf-8"))
    assert [block.line for block in blocks if block.reason == ""] == []


PAGE = """\
# A page

```python
first = 1
```

<!-- not run: needs two ranks -->
```python
raise RuntimeError
```

<!-- not run: -->
```python
raise RuntimeError
```

1. In a list:

   ```python
   if first:
       second = first + 1
   ```

```toml
third = 3
```
"""


def test_blocks_are_found_with_their_lines_and_reasons() -> None:
    blocks = python_blocks(PAGE)
    assert [(block.line, block.reason) for block in blocks] == [(4, None), (9, "needs two ranks"), (14, ""), (20, None)]
    assert blocks[3].code == "if first:\n    second = first + 1"


def test_blocks_run_in_order_in_one_namespace() -> None:
    namespace = run_blocks(python_blocks(PAGE), "page.md")
    assert namespace["second"] == 2
    assert "third" not in namespace


def test_a_failing_block_shows_the_pages_line() -> None:
    with pytest.raises(ZeroDivisionError) as error:
        run_blocks(python_blocks("text\n\n```python\nx = 1\nx / 0\n```\n"), "page.md")
    last = error.traceback[-1]
    assert (str(last.path).rpartition("/")[2], last.lineno + 1) == ("page.md", 5)
