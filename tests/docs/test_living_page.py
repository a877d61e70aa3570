"""The page `docs/alive.html` in a real browser: offline, with keys, on a desk and on a phone."""

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from docs.alive_ranks import INPUTS
from tests.cli.plan.test_page import SMALLEST
from tests.docs.conftest import DOCS

pytestmark = pytest.mark.slow  # a browser starts

PAGE = DOCS / "alive.html"
SMALLEST_WORDS = """() => Math.min(...[...document.querySelectorAll("body *")]
    .filter((one) => !one.closest("svg") && one.checkVisibility() && [...one.childNodes].some((node) => node.nodeType === 3 && node.data.trim()))
    .map((one) => parseFloat(getComputedStyle(one).fontSize)))"""  # noqa: E501
Open = Callable[..., Any]


@pytest.fixture
def opened(browser: Any) -> Iterator[Open]:
    """Function that opens the page offline. The page must cause no message on the console and no request."""
    said: list[str] = []
    contexts = []

    def open_page(width: int = 1280, **settings: Any) -> Any:
        context = browser.new_context(viewport={"width": width, "height": 900}, offline=True, **settings)
        contexts.append(context)
        page = context.new_page()
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("console", lambda message: said.append(message.text))
        page.on("request", lambda request: request.url == PAGE.as_uri() or said.append(request.url))
        page.goto(PAGE.as_uri())
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert said == []


def stored(page: Any) -> dict[str, Any]:
    return json.loads(page.locator("#data").text_content())


def cells(page: Any, rank: int, name: str) -> list[str]:
    return page.locator(f'[data-key="{rank} {name}"] .grid span').all_inner_texts()


def shown(numbers: torch.Tensor) -> list[str]:
    """Numbers as the page writes them."""
    texts = [f"{n:g}" if float(n * 2).is_integer() else f"{n:.2f}" for n in numbers.flatten().tolist()]
    return [text.replace("-", "\u2212") for text in texts]


def test_steps_of_the_cut_show_the_numbers_of_plain_matrices(opened: Open) -> None:
    page = opened(reduced_motion="reduce")
    stage = page.locator("#cut-stage")
    assert page.locator("#cut-steps output").inner_text() == "Step 1 of 6"
    assert not page.locator('[data-key="0 z"]').is_visible()
    for _ in range(5):
        stage.press("ArrowRight")
    x, a, b = (torch.tensor(INPUTS[name], dtype=torch.float64) for name in ("x", "a", "b"))
    z = F.gelu(x @ a) @ b
    assert cells(page, 0, "z") == cells(page, 1, "z") == shown(z)
    assert page.locator('[data-key="1 z"]').is_visible()
    assert page.locator(".flying").count() == 0
    terms = [
        float(text.replace("\u2212", "-"))
        for text in re.findall(r"[\u2212\d.]+", page.locator("#cut-formula").inner_text())
    ]
    assert terms[1] + terms[2] == pytest.approx(terms[3], abs=2e-6) == pytest.approx(z[0, 0].item(), abs=2e-6)
    stage.press("ArrowUp")
    assert page.locator("#cut-formula").inner_text().startswith("Rank 2: ")
    stage.press("ArrowLeft")
    assert page.locator("#cut-steps output").inner_text() == "Step 5 of 6"


def test_backward_and_rows_first_have_their_own_steps(opened: Open) -> None:
    page = opened()
    for scene, name, expected in (
        ("backward", "grad_x", shown(torch.tensor(stored(page)["cut"]["ranks"][0]["grad_x"]))),
        ("rows", "rows_wrong", shown(torch.tensor(stored(page)["cut"]["ranks"][0]["rows_wrong"]))),
    ):
        page.locator(f"[name=scene][value={scene}]").check(force=True)
        while page.locator("#cut-steps button", has_text="Next").is_enabled():
            page.locator("#cut-stage").press("ArrowRight")
        assert cells(page, 0, name) == expected
    wrong = page.locator("#cut .wrong")
    cut = stored(page)["cut"]["ranks"][0]
    differ = torch.tensor(cut["rows_wrong"]) != torch.tensor(cut["rows_y"])
    assert wrong.count() == 2 * int(differ.sum())


def test_numbers_move_to_their_places(opened: Open) -> None:
    page = opened()
    for _ in range(3):
        page.locator("#cut-stage").press("ArrowRight")  # each step ends the moves of the step before it
    assert page.locator(".flying").count() == 2 * held_in(page, "y")
    page.evaluate("Promise.all(document.getAnimations().map((one) => one.finished))")
    assert page.locator(".flying").count() == 0
    page.locator("#cut-stage").press("ArrowLeft")
    assert page.locator(".flying").count() == 0


def held_in(page: Any, name: str) -> int:
    """Number of cells of a rank's matrix."""
    return page.locator(f'[data-key="0 {name}"] .grid span').count()


def test_a_figure_plays_and_stops(opened: Open) -> None:
    page = opened()
    page.clock.install()
    page.locator("#layer-stage").press(" ")
    page.clock.run_for(3000)
    assert page.locator("#layer-steps output").inner_text() == "Step 3 of 18"
    page.locator("#layer-stage").press(" ")
    page.clock.run_for(9000)
    assert page.locator("#layer-steps output").inner_text() == "Step 3 of 18"


def test_each_of_f_and_g_sends_in_one_pass(opened: Open) -> None:
    page = opened()
    seen = []
    for _ in range(18):
        current = page.locator(".operator.current")
        if current.count():
            sends = "sends" in current.get_attribute("class").split()
            seen.append((page.locator("#layer-told strong").inner_text(), current.inner_text(), sends))
        page.locator("#layer-stage").press("ArrowRight")
    forward = [("Forward. ", name, name == "g") for name in "fgfg"]
    assert seen == [*forward, *(("Backward. ", name, name == "f") for name in "gfgf")]
    assert "4 of 4 messages" in page.locator("#layer-told").inner_text()


def test_sliders_show_what_the_planner_says(opened: Open) -> None:
    page = opened()
    sliders = page.locator("#loss-controls input")
    sliders.nth(0).press("End")
    sliders.nth(3).press("Home")
    loss = stored(page)["loss"]
    place = [len(loss["controls"]["vocabulary V"]) - 1, *loss["first"][1:3], 0]
    gathered, ours = (loss["grid"][" ".join(map(str, place))][index] for index in (1, 5))
    words = page.locator("#loss-words").inner_text()
    assert words.startswith(f"Gathering sends {gathered / ours:,.0f} times")
    told = page.locator("#loss-bars").get_attribute("aria-label")
    assert f"{gathered / 1e9:.3g}\u202fGB" in told or f"{gathered / 1e6:.3g}\u202fMB" in told


def test_the_wall_tells_the_fewest_ranks_of_each_model(opened: Open) -> None:
    page = opened()
    for index, model in enumerate(stored(page)["memory"]["models"]):
        page.locator("[name=memory-model]").nth(index).check(force=True)
        ranks = f"{model['paper']} tensor rank{'s' if model['paper'] > 1 else ''}"
        assert (
            page.locator("#memory-words").inner_text()
            == f"The {model['name']} model fits from {ranks} on. The paper uses {model['paper']}."
        )
        total = sum(model["rows"][0]["parts"]) / 1000
        assert f"1 rank: {total:.1f} GB" in page.locator("#memory-bars").get_attribute("aria-label")


def test_curves_follow_depth_and_rate(opened: Open) -> None:
    page = opened()
    norms = stored(page)["norms"]
    for depth in range(len(norms["depths"])):
        page.locator("[name=depth]").nth(depth).check(force=True)
        key = f"before {norms['depths'][depth]} {norms['rates'][2]}"
        assert f"norms before: {norms['scores'][key][0]:.3f}" in page.locator("#norms-words").inner_text()
        drawn = sum(len(norms["losses"][f"{place} {key.split(' ', 1)[1]}"]) for place in ("before", "after"))
        assert page.locator("#norms-curves path").count() == drawn


def test_each_figure_of_quality_has_a_bar_for_each_size_and_the_papers_values(opened: Open) -> None:
    page = opened()
    quality = stored(page)["quality"]
    seeds = sum(len(size["curves"]) for size in quality["sizes"])
    assert page.locator("#quality-curves path").count() == seeds
    for index, figure in enumerate(quality["figures"]):
        page.locator("[name=quality-figure]").nth(index).check(force=True)
        told = page.locator("#quality-bars").get_attribute("aria-label")
        for size, words in zip(quality["sizes"], figure["words"], strict=True):
            assert f"{size['name']}, {size['parameters']}: {words}" in told
        words = page.locator("#quality-words").inner_text()
        assert all(value in words for value in figure["paper"])
        assert any(figure["paper"]) or words.startswith("The paper does not give")


def test_tables_and_bars_write_the_stored_numbers(opened: Open) -> None:
    page = opened()
    figures = stored(page)
    table = [line.split() for line in page.locator("#memory-table tbody tr").all_inner_texts()]
    for cells_of, model in zip(table, figures["memory"]["models"], strict=True):
        totals = [f"{sum(row['parts']) / 1000:.1f}" for row in model["rows"]]
        assert cells_of == [model["name"], *totals, *["\u2013"] * (4 - len(totals))]
    for told, one in zip(page.locator("#scaling-bars svg").all(), figures["scaling"], strict=True):
        paper, ours = one["paper"], one["ours"]
        points = f"{100 * (ours - paper):+.1f}".replace("-", "\u2212")
        assert told.get_attribute("aria-label") == f"paper: {paper:.1%}; our forecast: {ours:.1%}, {points} points"
    recorded = figures["cut"]["ranks"]
    numbers = re.findall(r"[\d.]+(?=\s|$)", page.locator("#loss-table tbody tr").nth(2).inner_text())
    assert [float(number) for number in numbers] == [
        *(rank["sum_part"][0][0] for rank in recorded),
        recorded[0]["sum"][0][0],
    ]
    assert float(page.locator("#loss-table tbody tr").last.inner_text().split()[-1]) == recorded[0]["loss"][0][0]
    for _ in range(17):
        page.locator("#layer-stage").press("ArrowRight")
    sent = sum(each["bytes"] for each in figures["layer"]["messages"]) / 1e6
    assert page.locator("#layer-told").inner_text().endswith(f"4 of 4 messages, {sent:.3g}\u202fMB.")


@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_words_are_legible_and_nothing_is_wider_than_the_screen(opened: Open, width: int, scheme: str) -> None:
    page = opened(width, color_scheme=scheme)
    for _ in range(5):
        page.locator("#cut-stage").press("ArrowRight")
    assert page.evaluate(SMALLEST) >= 11
    assert page.evaluate(SMALLEST_WORDS) >= 11
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    inside = "[...document.querySelectorAll('.lane')].every((one) => one.scrollWidth <= one.clientWidth)"
    assert page.evaluate(inside)
    paper = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert paper == {"light": "rgb(247, 244, 238)", "dark": "rgb(23, 24, 26)"}[scheme]


def test_the_keyboard_reaches_everything_that_has_a_name(opened: Open) -> None:
    page = opened()
    unnamed = page.locator("input, button, [tabindex], [role=img]").evaluate_all("""(all) => all
      .filter((one) => !(one.getAttribute("aria-label") || one.labels?.length || one.textContent.trim()))
      .map((one) => one.outerHTML)""")
    assert unnamed == []
    reached = set()
    for _ in range(60):
        page.keyboard.press("Tab")
        reached.add(
            page.evaluate(
                "document.activeElement.id || document.activeElement.name || document.activeElement.textContent"
            )
        )
    assert {"cut-stage", "layer-stage", "scene", "memory-model", "depth", "rate", "Play"} <= reached
