"""The benchmark of extraction counts strings as trafilatura does, and fails no page for its line breaks."""

import pytest

from benchmarks.corpus.extraction.pages import Expected, Page
from benchmarks.extract import Case, count, extracted, installed, measure, print_figures

PAGE = Page(
    id="a", registry="pypi", package="a", version="1", archive="a.whl", path="a.html", sha256="0" * 64, site="a",
    kind="blog", language="en", half="work",
)  # fmt: skip
EXPECTED = Expected(id="a", keep=["the northern wall", "a sentence that is absent"], drop=["Older news", "Imprint"])
CASE = Case(PAGE, "<nav>Imprint</nav><h1>Walls</h1><p>the <b>northern</b>\nwall</p><p>Older news</p>", EXPECTED)


def test_strings_are_counted_without_whitespace() -> None:
    counts = count([CASE], {"a": "thenorthernwallOldernews"})
    assert {name: counts[name] for name in counts if "ive" in name} == {
        "true positive": 1,
        "false negative": 1,
        "false positive": 1,
        "true negative": 1,
    }
    assert count([CASE], {"a": ""})["empty"] == 1


def test_figures_of_an_extractor_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    contenders = {name: extractor for name, extractor in installed().items() if name in ("crosscut", "resiliparse")}
    assert len(contenders) == 2
    texts, seconds = measure(contenders, [CASE], repeats=2)
    assert "thenorthernwall" in texts["crosscut"]["a"]
    assert [len(halves["work"]) for halves in seconds.values()] == [2, 2]
    print_figures("half work", [CASE], texts, seconds)
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("crosscut"))
    assert line.split()[1:5] == ["0.500", "0.500", "0.500", "0"]


def test_extractor_that_fails_has_found_nothing() -> None:
    def fails(markup: str) -> str:
        raise ValueError(markup)

    assert extracted(fails, "<p>text") == ""
