import dataclasses
import re
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from crosscut.config import PRESETS, CorpusConfig, load_corpus, load_run
from crosscut.config.axes import AXES
from crosscut.config.corpora import SourceConfig
from tests.docs.conftest import load_program

generator = load_program("generate")


KINDS = [*generator.sections().values(), *generator.sections(CorpusConfig).values(), SourceConfig]


@pytest.mark.parametrize("kind", KINDS)
def test_every_field_has_a_text(kind: type) -> None:
    names = {field.name for field in dataclasses.fields(kind)}
    assert set(generator.field_docs(kind)) == names


def test_page_names_every_key_and_preset() -> None:
    page = generator.configuration_page()
    for section, kind in generator.sections().items():
        assert f"## `[{section}]`" in page
        assert all(f"| `{field.name}` |" in page for field in dataclasses.fields(kind))
    assert all(f"| `{name}` |" in page for name in PRESETS)


def test_page_has_the_table_of_axes() -> None:
    page = generator.configuration_page()
    rows = re.findall(r"^\| `(\w+)` \| .* \| (.*) \| (the ranks that are left|`layout.*`) \|$", page, re.MULTILINE)
    keys = ["the ranks that are left" if row.is_derived else f"`layout.{row.option}`" for row in AXES]
    assert [(name, key) for name, _, key in rows] == [(row.name, key) for row, key in zip(AXES, keys, strict=True)]
    assert all(role.startswith(row.role) for (_, role, _), row in zip(rows, AXES, strict=True))


def test_page_of_a_corpus_names_every_key() -> None:
    page = generator.corpus_page()
    for kind in (*generator.sections(CorpusConfig).values(), SourceConfig):
        assert all(f"| `{field.name}` |" in page for field in dataclasses.fields(kind))
    assert set(re.findall(r"^## `\[+(\w+)\]+`", page, re.MULTILINE)) | {"folder", "seed"} == {
        field.name for field in dataclasses.fields(CorpusConfig)
    }


def test_a_bar_does_not_break_the_table() -> None:
    @dataclasses.dataclass
    class Section:
        choice: str = "a"
        """a | b,
        or c"""

        untold: int = 0

    # A nested class is indented; its source is read as that of a module's.
    with pytest.MonkeyPatch.context() as patch:
        source = generator.inspect.cleandoc(generator.inspect.getsource(Section))
        patch.setattr(generator.inspect, "getsource", lambda _: source)
        assert generator.field_docs(Section) == {"choice": r"a \| b, or c"}


@pytest.mark.slow  # it makes all pages three times
def test_a_stale_page_fails_the_check_until_it_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "configuration.md"
    page.write_text("old")
    assert generator.main(["--check"], tmp_path) == 1
    assert page.read_text() == "old"
    assert "configuration.md is stale: run `python docs/generate.py`.\n" in capsys.readouterr().err
    assert generator.main([], tmp_path) == 0
    assert generator.main(["--check"], tmp_path) == 0
    written = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.*")}
    assert written == set(generator.PAGES)


@pytest.mark.parametrize(
    ("page", "load"),
    [(generator.configuration_page, load_run), (generator.corpus_page, load_corpus)],
    ids=["run", "corpus"],
)
def test_examples_of_a_page_can_be_loaded(page: Callable[[], str], load: Callable[[object], object]) -> None:
    blocks = toml_blocks(page())
    assert blocks
    for block in blocks:
        load(tomllib.loads(block))


def toml_blocks(page: str) -> list[str]:
    return re.findall(r"```toml\n(.*?)```", page, re.DOTALL)


@pytest.mark.parametrize("page", [generator.configuration_page, generator.corpus_page])
def test_defaults_are_written_as_toml(page: Callable[[], str]) -> None:
    defaults = re.findall(r"^\| `\w+` \| `(.*?)` \|", page(), re.MULTILINE)
    assert defaults
    for default in defaults:
        tomllib.loads(f"value = {default}")
