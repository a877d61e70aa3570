"""The page at /, in a real browser."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.serving.conftest import NAME, Server, start

DESK, PHONE = {"width": 1200, "height": 800}, {"width": 390, "height": 844}


@pytest.fixture(scope="module")
def context(browser) -> Iterator[Any]:
    context = browser.new_context(viewport=DESK, permissions=["clipboard-read", "clipboard-write"])
    yield context
    context.close()


@pytest.fixture
def page(context, whole: Server) -> Iterator[Any]:
    """The page of a running server; a message on its console is a mistake."""
    page = context.new_page()
    said: list[str] = []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.goto(whole.url)
    page.locator("#model", has_text=NAME).wait_for()
    yield page
    page.close()
    assert [line for line in said if not line.startswith("Failed to load resource")] == []


def choose(page: Any, **settings: object) -> None:
    """Set controls, also where they are folded away."""
    for name, value in settings.items():
        page.evaluate("([name, value]) => { document.getElementById(name).value = value }", [name, value])


def write(page: Any, prompt: str, tokens: int = 40, seed: object = 7) -> None:
    """Have a text written, and wait for its end."""
    choose(page, max_tokens=tokens, seed=seed)
    page.fill("#prompt", prompt)
    page.click("#run")
    page.locator("#seed-used:not([hidden])").wait_for()


def test_a_text_appears_with_its_probabilities(page):
    write(page, "Fellow citizens")
    assert page.locator(".given").inner_text() == "Fellow citizens"
    tokens = page.locator(".token")
    count = tokens.count()
    assert 1 <= count <= 40
    told = page.locator("#figures").inner_text()
    assert re.match(rf"{count} tokens · [\d.]+ per second · perplexity [\d.]+ · ", told)
    surprises = tokens.evaluate_all("spans => spans.map(span => Number(span.style.getPropertyValue('--surprise')))")
    assert all(0 <= one <= 1 for one in surprises)
    assert len(set(surprises)) > 1
    assert all(page.get_by_role("slider", name=name).count() == 1 for name in ("Temperature", "Top p", "Tokens"))


@contextmanager
def told_of_its_model(context: Any, server: Server, **changes: bool) -> Iterator[Any]:
    """The page, to which the server's own list of models comes with changes."""

    def changed(route: Any) -> None:
        answer = route.fetch()
        told = answer.json()
        for model in told["data"]:
            assert model["chat"] is True
            model |= changes
        route.fulfill(response=answer, json=told)

    page = context.new_page()
    page.route("**/v1/models", changed)
    page.goto(server.url)
    page.locator("#model", has_text=NAME).wait_for()
    yield page
    page.close()


@pytest.mark.slow  # only the page's own program
def test_an_encoder_is_told_and_writes_nothing(context, whole: Server):
    with told_of_its_model(context, whole, chat=False, embeddings=True) as page:
        assert page.locator("#hint").inner_text().startswith("This model is an encoder. It writes no text: ")
        assert page.locator("#prompt").is_disabled()
        assert page.locator("#run").is_disabled()


@pytest.mark.slow  # only the page's own program
def test_a_token_tells_what_else_was_likely(page):
    write(page, "Fellow citizens")
    page.locator(".token", has_text=re.compile(r"\w")).first.hover()
    card = page.locator("#card")
    assert card.is_visible()
    shares = [float(one.strip("<% ")) for one in re.findall(r"[<\d. ]+%", card.locator("ol").inner_text())]
    assert len(shares) >= 8
    assert shares[:8] == sorted(shares[:8], reverse=True)
    assert card.locator("li.written").count() == 1
    page.locator("#prompt").hover()
    assert card.is_hidden()


@pytest.mark.slow  # test_client.py repeats texts by their seed
def test_the_seed_repeats_a_text(page):
    write(page, "We", seed="")
    first = page.locator(".turn").inner_text()
    page.click("#seed-used")
    write(page, "We", seed=page.input_value("#seed"))
    assert page.locator(".turn").inner_text() == first


def test_a_chat_goes_on(page):
    page.check("[name=mode][value=chat]", force=True)
    write(page, "Who are you?", 12)
    write(page, "And who am I?", 12)
    assert page.locator(".turn.asked").all_inner_texts() == ["Who are you?", "And who am I?"]
    assert page.locator(".turn.answer .token").count() >= 2
    assert page.input_value("#prompt") == ""
    page.click("#clear")
    assert page.locator(".turn").count() == 0


@pytest.mark.slow  # only the page's own program
def test_a_model_without_a_template_tells_why_it_does_not_chat(context, whole):
    reason = "Chat is off, because this model has no chat template."
    with told_of_its_model(context, whole, chat=False) as page:
        page.locator("#hint", has_text=reason).wait_for()
        assert page.locator("[name=mode][value=chat]").is_disabled()
        write(page, "We", 3)
        assert page.locator("#hint").inner_text() == ""
        page.locator("label", has_text="Chat").click(force=True)
        assert page.locator("#problem").inner_text().startswith(reason)


STOP_AT_FIRST_TOKEN = """() => {
  const stop = (_, observer) => {
    if (!document.querySelector(".token")) return;
    observer.disconnect();
    document.getElementById("run").click();
  };
  new MutationObserver(stop).observe(document.getElementById("turns"), { childList: true, subtree: true });
}"""


def test_stop_ends_the_text(page, whole):
    choose(page, max_tokens=250, temperature=0)
    page.evaluate(STOP_AT_FIRST_TOKEN)  # a tiny model is done before a driver could press the button
    page.fill("#prompt", "We")
    page.click("#run")
    page.locator("#figures", has_text="stopped").wait_for()
    assert page.locator(".token").count() < 250
    assert page.locator("#run").inner_text() == "Write"
    whole.wait_for(running=0, waiting=0)


@pytest.mark.slow  # only the page's own program
def test_copy_takes_the_text(page):
    write(page, "Fellow citizens", 20)
    page.click("#copy")
    page.locator("#copy", has_text="Copied").wait_for()
    assert page.evaluate("navigator.clipboard.readText()").startswith("Fellow citizens")


@pytest.mark.slow  # only the page's own program
def test_what_the_server_refuses_is_shown(page):
    page.fill("#prompt", "word " * 300)
    page.click("#run")
    page.wait_for_selector("#problem:not([hidden])")
    assert "fit in the model's window" in page.locator("#problem").inner_text()


@pytest.mark.slow  # only the page's own style
@pytest.mark.parametrize(
    ("size", "scheme"),
    [
        pytest.param(
            DESK,
            "light",
            id="desk, light",
        ),
        pytest.param(DESK, "dark", id="desk, dark"),
        pytest.param(PHONE, "light", id="phone, light"),
        pytest.param(PHONE, "dark", id="phone, dark"),
    ],
)
def test_everything_is_in_sight(browser, whole, scheme, size, tmp_path):
    context = browser.new_context(viewport=size, color_scheme=scheme, has_touch=size is PHONE)
    page = context.new_page()
    page.goto(whole.url)
    page.locator("#model", has_text=NAME).wait_for()
    write(page, "Fellow citizens of the Senate and of the House of Representatives:", 100)
    tokens = page.locator(".token", has_text=re.compile(r"\w\w"))
    place = tokens.nth(tokens.count() // 2)
    place.tap() if size is PHONE else place.hover()
    page.screenshot(path=tmp_path / "page.png")
    for name in ("#prompt", "#run", "#model", "#sheet", "#card", "#figures"):
        box = page.locator(name).bounding_box()
        assert box["x"] >= 0, name
        assert box["x"] + box["width"] <= size["width"], name
        assert box["y"] + box["height"] <= size["height"], name
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert (tmp_path / "page.png").stat().st_size > 10_000
    context.close()


@pytest.mark.slow
def test_the_page_asks_for_the_key(browser, model_folder):
    server = start(model_folder, CROSSCUT_API_KEY="secret")
    context = browser.new_context()
    page = context.new_page()
    page.goto(server.url)
    for key in ("wrong", "secret"):
        page.locator("#key-dialog[open]").wait_for()
        page.fill("#key", key)
        page.click("#key-dialog button")
    page.locator("#model", has_text=NAME).wait_for()
    write(page, "We", 3)
    assert page.locator(".token").count() >= 1
    context.close()
    assert server.stop() == (0, "")
