"""The page of `crosscut plan --html` in a real browser."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cli.plan.test_command import run

pytestmark = pytest.mark.slow  # a browser starts

ASKED = ("--model", "2.5B", "--gpus", "16", "--gpu", "h100-sxm", "training.batch_size=64", "--tokens", "100B")
SMALLEST = """() => Math.min(...[...document.querySelectorAll("svg text")].map((text) => {
    const { ownerSVGElement: svg } = text;
    const scale = svg.getBoundingClientRect().width / svg.viewBox.baseVal.width;
    return parseFloat(getComputedStyle(text).fontSize) * scale;
}))"""


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plan's page."""
    path = tmp_path_factory.mktemp("plan") / "plan.html"
    run("plan", *ASKED, "--price", "2USD", "--html", str(path))
    return path


@pytest.fixture(params=[1280, 390])
def page(request: pytest.FixtureRequest, browser: Any, written: Path) -> Iterator[Any]:
    """The page, as wide as a desk's or a phone's screen. It must cause no error and no request."""
    said: list[str] = []
    context = browser.new_context(viewport={"width": request.param, "height": 900}, offline=True)
    page = context.new_page()
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("console", lambda message: said.append(message.text))
    page.goto(written.as_uri())
    yield page
    context.close()
    assert said == []


def test_words_are_legible_and_nothing_is_wider_than_the_screen(page: Any) -> None:
    assert page.evaluate(SMALLEST) >= 11
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_drawings_have_words_for_screen_readers(page: Any) -> None:
    assert "tensor 1: " in page.locator("#wall").get_attribute("aria-label")
    assert page.locator("#time").get_attribute("aria-label").count("%") >= 2
    assert "GB" in page.locator("#plan circle").first.get_attribute("aria-label")
    assert "days" in page.locator("#time-words").inner_text()
    assert "USD" in page.locator("#time-words").inner_text()


def test_a_kept_choice_stands_beside_others(page: Any) -> None:
    before = page.locator("#time").get_attribute("aria-label").split("; ")
    page.get_by_role("button", name="Keep this choice").click()
    page.locator("#tensor").press("ArrowRight")
    *_, kept = page.locator("#time").get_attribute("aria-label").split("; ")
    assert kept in [entry.replace("tensor 1", "kept") for entry in before]
    page.get_by_role("button", name="Forget").click()
    assert "kept" not in page.locator("#time").get_attribute("aria-label")


def test_each_slider_has_its_name(page: Any) -> None:
    for name in ("model", "tensor ranks", "micro-batch"):
        assert page.get_by_role("slider", name=name).count() == 1, name
