"""The page of a report, in a real browser: offline, whatever stands in the documents."""

import json
import re
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from crosscut.corpus.audit.corpus_report import build_report, measure_timings
from crosscut.corpus.audit.page import make_page, write_page
from tests.corpus.audit.conftest import HOSTILE, LEAKED, Audited

DESK, PHONE = {"width": 1200, "height": 800}, {"width": 390, "height": 844}


def write(folder: Path, audited: Audited, results: list) -> Path:
    path = folder / "report.html"
    report = build_report(results, audited.config, audited.work)
    write_page(report, measure_timings(results, audited.config), path)
    return path


@pytest.fixture(scope="module")
def file(audited: Audited, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("page"), audited, audited.results)


@pytest.fixture(scope="module")
def opened(browser):
    """Opens pages; a message on the console and any request but that for the file are mistakes."""
    said: list[str] = []
    context = browser.new_context(viewport=DESK, offline=True, reduced_motion="reduce")  # it scrolls at once

    def open_page(path: Path) -> Any:
        page = context.new_page()
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("request", lambda request: request.url.startswith(("file:", "data:")) or said.append(request.url))
        page.goto(path.as_uri())
        return page

    yield open_page
    context.close()
    assert said == []


@pytest.fixture(scope="module")
def page(opened, file):
    """The page of the corpus, opened once: a test that changes what is shown takes it back."""
    return opened(file)


@pytest.fixture
def unfolded(page):
    page.evaluate("document.querySelectorAll('details').forEach((fold) => { fold.open = true })")
    yield page
    page.evaluate("document.querySelectorAll('details').forEach((fold) => { fold.open = false })")


def test_the_report_lies_in_the_page_as_data():
    report = {"flow": [], "text": f"{HOSTILE}\u2028 \\u003c"}
    html = make_page(report, {"folder": "x"})
    (block,) = re.findall(r'<script type="application/json" id="report">(.*?)</script>', html)
    assert "<" not in block
    assert json.loads(block) == report
    assert not re.search(r'(src|href)="(?!data:|#)', html.split("<body>")[0])


def test_what_is_no_utf_8_is_written_all_the_same(tmp_path):
    write_page({"flow": [], "text": "bad\udcff.eml"}, {"folder": "\udcff"}, tmp_path / "report.html")
    (block,) = re.findall(r'id="report">(.*?)</script>', (tmp_path / "report.html").read_text(encoding="utf-8"))
    assert json.loads(block)["text"] == "bad\udcff.eml"


def test_text_of_documents_is_shown_and_never_run(unfolded):
    page = unfolded
    page.locator("#stage-length .sample .text", has_text=HOSTILE.strip()).wait_for()
    page.locator("#stage-ingest .sample .text", has_text=HOSTILE.strip()).first.wait_for()
    assert page.title().startswith("Corpus audit")
    assert page.locator("main img, main script").count() == 0


def test_the_first_screen_answers(page, audited):
    page.evaluate("scrollTo(0, 0)")
    kept = build_report(audited.results, audited.config, audited.work)["summary"]["kept"]
    assert f"{kept['documents']} of 93 documents" in page.locator(".cards").inner_text()
    assert "20.00" in page.locator(".card", has_text="Test data").inner_text()
    flow = page.locator(".flow a")
    assert flow.count() == 7
    name = flow.nth(3).get_attribute("aria-label")
    assert re.fullmatch(r"Language: \d+ in, 8 dropped \([\d.]+\s%\), \d+ left", name)
    assert "1 cut" in flow.nth(6).text_content()
    box = page.locator(".flow svg").bounding_box()
    assert box["y"] + box["height"] < DESK["height"]


def test_figures_follow_the_unit(page):
    length = page.locator("#stage-length .rule .number").first
    assert length.inner_text() == "2"
    page.check("[name=unit][value=tokens]", force=True)
    assert length.inner_text() == "11"
    assert "\u2248" in page.locator("#stage-language .rule .number").first.inner_text()
    page.check("[name=unit][value=bytes]", force=True)
    assert re.fullmatch(r"\d+\sB", length.inner_text())
    assert "1 passage cut out of 1 document" in page.locator("#stage-leakage").inner_text()
    page.check("[name=unit][value=documents]", force=True)


def test_keys_lead_from_the_flow_to_a_stage(page):
    page.locator(".flow a").nth(4).focus()
    page.keyboard.press("Enter")
    assert page.evaluate("location.hash") == "#stage-length"
    assert 0 <= page.locator("#stage-length").bounding_box()["y"] < DESK["height"] / 2
    page.locator("#stage-length summary").focus()
    page.keyboard.press("Enter")
    assert page.locator("#stage-length .sample").first.is_visible()
    page.keyboard.press("Enter")


def test_what_differs_is_marked(unfolded):
    pair = unfolded.locator("#stage-near .pair").first
    pair.locator("del").first.wait_for()
    assert set(pair.locator("del").all_inner_texts()) <= {"THAT", "Copied", "once", "more", "."}
    assert set(pair.locator("ins").all_inner_texts()) <= {"the", "of"}
    assert pair.locator("del").count() + pair.locator("ins").count() > 0
    unfolded.locator("#stage-cleaning del").first.wait_for()
    assert unfolded.locator("#stage-cleaning del").all_inner_texts()[:3] == ["It\u00e2", "\u20ac", "\u2122"]


def test_the_search_leaves_the_samples_with_all_words(page):
    page.fill("[type=search]", "situaci\u00f3n UNI\u00d3N")
    assert page.locator("#losses output").inner_text().startswith("5 of ")
    assert page.locator("#losses .sample:visible").count() == 5
    assert page.locator("#stage-length .rule").is_hidden()
    page.fill("[type=search]", "")
    assert page.locator("#losses .sample:visible").count() == 0
    assert page.locator("#stage-length .rule").is_visible()


def test_leaked_passages_can_be_read(page):
    section = page.locator("#leakage")
    assert re.search(r"made\s+20\s+4\s+20\.00", section.locator("table").first.inner_text())
    section.locator("summary").first.click()
    assert section.locator(".sample .text").first.inner_text() == LEAKED
    section.locator("summary").first.click()


FITS = "(width) => innerWidth === width && document.documentElement.scrollWidth <= width"
"""Whether the page has drawn itself for a new width, without anything that is wider."""


@pytest.mark.slow  # only the page's looks
def test_nothing_is_wider_than_the_window(unfolded):
    page = unfolded
    for size, scheme in product((PHONE, DESK), ("dark", "light")):  # at last, the size of the other tests
        page.set_viewport_size(size)
        page.emulate_media(color_scheme=scheme)
        page.wait_for_function(FITS, arg=size["width"])
        outside = page.evaluate(
            "[...document.querySelectorAll('.flow text, .card strong, h1, h2, h3, .sample')].filter((one) => {"
            "const box = one.getBoundingClientRect(); return box.left < 0 || box.right > innerWidth + 0.5"
            "}).map((one) => one.textContent)"
        )
        assert outside == []
        paper = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (int(re.findall(r"\d+", paper)[0]) < 128) == (scheme == "dark")


OVERLAPS = """() => [...document.querySelectorAll(".histogram ol")].map((list) => {
    const shown = [...list.querySelectorAll(".edge:not(.without)")].map((edge) => edge.getBoundingClientRect());
    const apart = shown.every((edge, i) => !i || edge.left >= shown[i - 1].right + 2);
    return shown.length >= 2 && apart && shown.at(-1).right <= innerWidth;
})"""


WIDTHS = (1280, 800, 400)


@pytest.mark.slow  # only the page's looks
def test_labels_never_overlap(opened, audited, tmp_path):
    report = build_report(audited.results, audited.config, audited.work)
    amount = {"documents": 4_118_518_431, "bytes": 10**14, "tokens": 10**13}
    edges = [0, 1, *(half << power for power in range(1, 21) for half in (2, 3))]
    report["lengths"] = [{"from": float(edge), **amount} for edge in edges]
    report["scores"] = [{"from": number / 20, **amount} for number in range(20)]
    for entry in report["flow"]:
        entry["in"], entry["out"] = amount, amount
    write_page(report, measure_timings(audited.results, audited.config), tmp_path / "report.html")
    page = opened(tmp_path / "report.html")
    for width in WIDTHS:
        page.set_viewport_size({"width": width, "height": 900})
        page.wait_for_function(FITS, arg=width)
        page.wait_for_function(f"() => ({OVERLAPS})().every(Boolean)")
        assert page.locator(".histogram").count() == 3
        assert_apart(page.evaluate(BOXES))


BOXES = """() => [...document.querySelectorAll(".flow text")].map((text) => text.getBoundingClientRect())
    .filter((box) => box.width && box.height).map(({ x, y, width, height }) => ({ x, y, width, height }))"""


def assert_apart(boxes: list[dict[str, float]]) -> None:
    assert boxes
    for number, one in enumerate(boxes):
        for other in boxes[:number]:
            apart_x = one["x"] >= other["x"] + other["width"] or other["x"] >= one["x"] + one["width"]
            apart_y = one["y"] >= other["y"] + other["height"] - 4 or other["y"] >= one["y"] + one["height"] - 4
            assert apart_x or apart_y


@pytest.mark.one_in(4)
@pytest.mark.parametrize("missing", ["", "ingest", "audit", "near", "overlap"])
def test_a_page_of_fewer_stages_opens(opened, audited, tmp_path, missing):
    results = [one for one in audited.results if one.name != missing] if missing else []
    page = opened(write(tmp_path, audited, results))
    page.locator("#run-title").wait_for()
    assert page.locator("main").inner_text().count("undefined") == 0
    assert "NaN" not in page.locator("main").inner_text()
