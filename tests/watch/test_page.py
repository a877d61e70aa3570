"""The page in a real browser: live, offline, with keys and fingers, whatever stands in the files."""

import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from crosscut.watch.found import Runs
from crosscut.watch.pages import write_page
from crosscut.watch.server import WatchServer
from tests.watch.runs import HOSTILE, append, row, validation, write_rich_run, write_run

pytestmark = pytest.mark.slow  # a browser starts

DESK, PHONE = {"width": 1280, "height": 900}, {"width": 390, "height": 844}


@pytest.fixture(scope="module")
def said() -> Iterator[list[str]]:
    """Messages on the console, errors and requests that leave the machine. None is allowed."""
    said: list[str] = []
    yield said
    assert said == []


@pytest.fixture
def opened(browser, said) -> Iterator[Callable[..., Any]]:
    """Function that serves the runs in a folder and opens their page, or opens a file without a network."""
    servers, contexts = [], []

    def open_page(place: Path, **settings: Any) -> Any:
        is_file = place.suffix == ".html"
        context = browser.new_context(**{"viewport": DESK, "offline": is_file, **settings})
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        address = place.as_uri() if is_file else serve(place)
        page.on("request", lambda request: request.url.startswith((address, "data:")) or said.append(request.url))
        page.goto(address)
        page.locator(".u-over").first.wait_for()
        page.evaluate("new Promise(requestAnimationFrame)")
        return page

    def serve(place: Path) -> str:
        server = WatchServer(Runs([str(place)]), 0)
        servers.append(server)
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        return f"http://127.0.0.1:{server.server_port}/"

    yield open_page
    for context in contexts:
        context.close()
    for server in servers:
        server.shutdown()
        server.server_close()


def facts(page: Any) -> dict[str, str]:
    """Name and value of each fact above the charts."""
    script = "(all) => all.map((one) => [...one.children].slice(0, 2).map((part) => part.textContent))"
    return dict(page.locator(".fact").evaluate_all(script))


def labels(page: Any) -> list[str]:
    return page.evaluate("[...document.querySelectorAll('.plot')].map((one) => one.getAttribute('aria-label'))")


def told_of(page: Any) -> list[Any]:
    """Everything that the page knows of its runs: all points and all parts."""
    return page.evaluate("""[...runs.values()].map((run) => [run.name, run.parts, [...run.series].map(
      ([name, of]) => [name, [...of.steps.view()], [...of.values.view()].map(String)])])""")


def until(page: Any, condition: str) -> None:
    """Wait until a condition holds. The page's policy forbids `wait_for_function`."""
    for _ in range(400):
        if page.evaluate(condition):
            return
        page.wait_for_timeout(25)
    pytest.fail(f"`{condition}` does not hold after 10 s")


def test_figures_arrive_while_a_run_trains(opened, tmp_path):
    page = opened(write_run(tmp_path / "run", 40, total=100))
    assert facts(page)["Step"] == "40"
    append(tmp_path / "run", *map(row, range(41, 51)), validation(50, 1.5))
    page.locator("#facts", has_text="50of 100").wait_for(timeout=2000)
    page.get_by_text("1.500").first.wait_for(timeout=2000)
    assert "validation loss 1.500 at step 50" in labels(page)[0]
    write_run(tmp_path / "run", 20, total=100)  # a rollback
    page.locator("#facts", has_text="20of 100").wait_for(timeout=2000)
    assert page.evaluate("focused().series.get('loss').steps.length") == 20
    shutil.move(tmp_path / "run", tmp_path / "away")
    page.locator("#facts", has_text="folder is gone").wait_for(timeout=2000)
    assert facts(page)["Step"] == "20"


def test_a_page_in_a_hidden_tab_asks_nothing_until_it_is_seen(opened, tmp_path):
    page = opened(write_run(tmp_path / "run", 40))
    page.evaluate(
        "Object.defineProperty(document, 'hidden', { get: () => isHidden, configurable: true }); isHidden = true"
    )
    page.wait_for_timeout(1500)  # a question that is under way
    asked = []
    page.on("request", lambda request: asked.append(request.url))
    append(tmp_path / "run", row(41))
    page.evaluate("for (const run of runs.values()) run.cursor = ''")  # as if nothing of it had arrived yet
    page.wait_for_timeout(2500)
    assert asked == [] and facts(page)["Step"] == "40"
    page.evaluate("isHidden = false")
    page.locator("#facts", has_text="41").wait_for(timeout=2000)


def test_new_runs_appear_and_are_laid_over_each_other(opened, tmp_path):
    write_run(tmp_path / "a", 30)
    page = opened(tmp_path)
    assert not page.locator("aside").is_visible()
    write_run(tmp_path / "b", 60, seed=1)
    page.locator("#runs li").nth(1).wait_for(timeout=6000)
    page.locator("#details tr", has_text="training.seed").first.wait_for(timeout=4000)
    differing = page.locator("[aria-label='Settings that differ'] tbody tr").all_inner_texts()
    assert [line.split() for line in differing] == [["training.seed", "0", "1"], ["training.steps", "30", "60"]]
    assert labels(page)[0].count("at step") == 2
    page.get_by_label("Show a").uncheck()
    assert labels(page)[0].count("at step") == 1
    assert page.locator("#runs .name").all_inner_texts() == ["a", "b"]


def test_hundreds_of_runs_are_asked_for_in_portions(opened, tmp_path):
    for number in range(320):
        write_run(tmp_path / f"run-{number}", 2)
    page = opened(tmp_path)
    page.get_by_role("button", name="All").click()
    until(page, "visible().length === 320 && visible().every((run) => run.series.size)")
    assert page.evaluate("questions().length") == 4
    assert not page.locator("#more").is_visible()


def test_the_offline_file_shows_the_figures_of_the_live_page(opened, tmp_path):
    write_rich_run(tmp_path / "runs" / "rich")
    write_run(tmp_path / "runs" / "other", 500)
    live = opened(tmp_path / "runs")
    write_page([str(tmp_path / "runs")], tmp_path / "page.html")
    frozen = opened(tmp_path / "page.html")
    assert told_of(frozen) == told_of(live)
    assert facts(frozen) == facts(live)
    assert labels(frozen) == labels(live)
    assert frozen.locator("#details").inner_text() == live.locator("#details").inner_text()
    assert frozen.locator("#link").inner_text().startswith("as of ")


def test_texts_of_a_run_are_never_run(opened, tmp_path):
    name = HOSTILE.replace("/", "\u2215")
    write_rich_run(tmp_path / "runs" / name)
    write_run(tmp_path / "runs" / "b", 5, document_mask=HOSTILE)
    page = opened(tmp_path / "runs")
    page.locator("#runs .name", has_text=name).click()
    page.locator("blockquote", has_text=HOSTILE).wait_for()
    page.locator("h1", has_text=name).wait_for()
    page.locator("td", has_text=HOSTILE).first.wait_for()
    page.locator("#charts .u-over").first.hover()
    assert page.locator("img[src=x]").count() == 0


def test_everything_of_a_run_is_shown(opened, tmp_path):
    page = opened(write_rich_run(tmp_path / "run"))
    assert "12" in page.locator("[aria-label='Messages of a rank in a step'] tbody").inner_text()
    assert "planned 2.9\u202fMB" in page.locator(".ranks li").first.inner_text()
    assert "+3.4" in page.locator(".ranks li").first.inner_text()
    rates = page.locator("[aria-label='Learning rates by group'] tbody tr").all_inner_texts()
    words = [["embedding", "0.002000", "2.00"], ["matrix", "0.01000", "10.0"], ["scalar", "0.001000", "1.00"]]
    assert [line.split()[:3] for line in rates] == words
    assert "the ranks wait for rank 1" in page.locator("[aria-label='Events of the run']").inner_text()
    assert "loads at step 20" in page.locator(".load canvas").get_attribute("aria-label")
    slider = page.get_by_label("Step of the samples")
    slider.focus()
    page.keyboard.press("ArrowLeft")
    assert page.locator("blockquote").all_inner_texts() == ["Once there was"]


def test_a_file_that_cannot_be_read_is_named(opened, tmp_path):
    write_run(tmp_path / "run", 3)
    (tmp_path / "run" / "plan.json").write_text("{")
    page = opened(tmp_path / "run")
    assert page.locator("[aria-label='Files that are not shown'] li").inner_text().startswith("`plan.json` cannot be")


def test_memory_of_a_cpu_is_not_held_against_the_forecast_of_tensors(opened, tmp_path):
    page = opened(write_rich_run(tmp_path / "run", device="cpu"))
    rank = page.locator(".ranks li").first
    assert "measured 3\u202fMB" in rank.inner_text() and "%" not in rank.inner_text()
    assert page.locator(".memory[data-over]").count() == 0
    assert "growth of the whole process" in page.locator("[aria-label=Ranks] .note").inner_text()


def test_keys_move_zoom_and_read(opened, tmp_path):
    page = opened(write_run(tmp_path / "run", 100))
    page.locator(".plot").first.focus()
    page.keyboard.press("+")
    page.keyboard.press("+")
    low, high = page.evaluate("shownPart()")
    assert 1 < low < high < 100
    page.keyboard.press("Shift+ArrowRight")
    assert page.evaluate("shownPart()[0]") > low
    page.keyboard.press("0")
    assert page.evaluate("view.part") is None
    page.keyboard.press("End")
    page.keyboard.press("ArrowLeft")
    assert "Loss: step 99: " in page.locator("#spoken").inner_text()
    assert "step 99: " in page.locator(".readout").nth(1).inner_text()
    page.keyboard.press("ArrowRight")
    assert "Loss: step 100: " in page.locator("#spoken").inner_text()


def test_the_mouse_zooms_moves_and_shows_all(opened, tmp_path):
    page = opened(write_run(tmp_path / "run", 1000))
    box = page.locator(".u-over").first.bounding_box()
    middle = box["y"] + box["height"] / 2

    def drag(start: float, end: float) -> list[float]:
        page.mouse.move(box["x"] + start * box["width"], middle)
        page.mouse.down()
        page.mouse.move(box["x"] + end * box["width"], middle, steps=4)
        page.mouse.up()
        return page.evaluate("shownPart()")

    low, high = drag(0.25, 0.75)
    assert low == pytest.approx(250, abs=5) and high == pytest.approx(750, abs=5)
    page.keyboard.down("Shift")
    assert drag(0.5, 0.25)[0] == pytest.approx(375, abs=10)
    page.keyboard.up("Shift")
    page.keyboard.down("Control")
    page.mouse.wheel(0, -100)
    page.keyboard.up("Control")
    page.wait_for_timeout(100)
    assert page.evaluate("shownPart()[1] - shownPart()[0]") < 400
    page.mouse.dblclick(box["x"] + 50, middle)
    assert page.evaluate("view.part") is None


def test_the_line_of_validations_ends_only_after_the_one_before_the_first_step(opened, tmp_path):
    page = opened(write_run(tmp_path / "run", 1000))

    def gaps(low: float, high: float) -> list[float]:
        """Places without a value between the validations of a part."""
        drawn = f"showPart({low}, {high}); return new Promise(requestAnimationFrame)"
        page.evaluate(f"() => {{ {drawn}.then(() => new Promise(requestAnimationFrame)) }}")
        return page.evaluate("charts[0].plot.data[0].filter((x, i) => charts[0].plot.data.at(-1)[i] === null)")

    assert gaps(350, 950) == []
    for low in (0, 50):
        found = gaps(low, 600)
        assert found and max(found) <= 101


def test_two_fingers_zoom_and_one_moves(opened, tmp_path):
    page = opened(write_run(tmp_path / "run", 1000), viewport=PHONE, has_touch=True, is_mobile=True)
    touch = page.context.new_cdp_session(page)
    box = page.locator(".u-over").first.bounding_box()
    y = box["y"] + 40

    def touches(kind: str, *shares: float) -> None:
        points = [{"x": box["x"] + share * box["width"], "y": y, "id": i} for i, share in enumerate(shares)]
        touch.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": points})

    touches("touchStart", 0.4, 0.6)
    touches("touchMove", 0.3, 0.7)
    touches("touchMove", 0.2, 0.8)
    touches("touchEnd")
    low, high = page.evaluate("shownPart()")
    assert high - low == pytest.approx(333, abs=40)
    touches("touchStart", 0.5)
    touches("touchMove", 0.4)
    touches("touchMove", 0.3)
    touches("touchEnd")
    assert page.evaluate("shownPart()[0]") > low + 30


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone_needs_no_sideways_scrolling(opened, tmp_path, scheme):
    write_rich_run(tmp_path / "runs" / ("a-run-with-a-name-that-is-much-too-long-for-a-phone-" * 3))
    write_run(tmp_path / "runs" / "b", 50)
    page = opened(tmp_path / "runs", viewport=PHONE, color_scheme=scheme, reduced_motion="reduce")
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    paper = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert paper == {"light": "rgb(247, 244, 238)", "dark": "rgb(23, 24, 26)"}[scheme]


def test_controls_and_charts_have_names(opened, tmp_path):
    page = opened(write_rich_run(tmp_path / "run"))
    unnamed = page.locator("input, button, summary, [tabindex], [role=img]").evaluate_all("""(all) => all
      .filter((one) => !(one.getAttribute("aria-label") || one.labels?.length || one.textContent.trim()))
      .map((one) => one.outerHTML)""")
    assert unnamed == []
    assert labels(page)[0].startswith("Chart: Loss, nats per token")
    for control in ("Tokens", "Time", "log x", "log y"):
        page.locator("#controls label", has_text=control).click()
    page.get_by_label("smoothing").fill("1")
    assert facts(page)["Step"] == "61"


def test_short_runs_are_smoothed_less_until_the_reader_chooses(opened, tmp_path):
    write_run(tmp_path / "short", 20)
    write_run(tmp_path / "middle", 100)
    write_run(tmp_path / "long", 2000)
    page = opened(tmp_path)

    def weights() -> dict[str, float]:
        return page.evaluate("""Object.fromEntries(visible().map((run) => {
          const series = run.series.get("loss");
          const raw = series.values.view().join() === series.smoothed(axes.weight).join();
          return [run.name, raw ? 0 : series.weight];
        }))""")

    assert weights() == {"short": 0, "middle": 0.75, "long": 0.95}
    smoothing = page.get_by_label("smoothing")
    assert smoothing.get_attribute("aria-valuetext") == "auto"
    smoothing.fill("5")
    assert weights() == dict.fromkeys(("short", "middle", "long"), 0.9)
    smoothing.fill("1")
    assert weights() == dict.fromkeys(("short", "middle", "long"), 0)
    assert smoothing.get_attribute("aria-valuetext") == "off"


def test_axes_are_tokens_or_time_and_logarithmic(opened, tmp_path):
    page = opened(write_run(tmp_path / "run", 200))
    ends = {}
    for along in ("step", "tokens", "seconds"):
        page.evaluate(f"document.querySelector('[value={along}]').click()")
        ends[along] = page.evaluate("extent()")
    assert ends == {
        "step": [0, 200],
        "tokens": pytest.approx([0, 200 * 8 * 256], abs=4096),
        "seconds": pytest.approx([0, 100], abs=1),
    }
    page.get_by_label("log x").check()
    page.get_by_label("log y").check()
    assert page.evaluate("extent()[0]") > 0
    assert page.evaluate("charts[0].range[0]") > 1


def busiest_frame(page: Any) -> float:
    """Largest processor time of the page in one of 40 frames of panning, in milliseconds. The time of a frame on the
    clock depends on what else the machine does.
    """
    session = page.context.new_cdp_session(page)
    session.send("Performance.enable", {"timeDomain": "threadTicks"})

    def busy() -> float:
        metrics = session.send("Performance.getMetrics")["metrics"]
        return 1000 * next(one["value"] for one in metrics if one["name"] == "TaskDuration")

    page.evaluate("zoom(0.5)")
    frame = "(share) => { pan(share); return new Promise((r) => requestAnimationFrame(() => setTimeout(r))); }"
    times = []
    for i in range(41):
        before = busy()
        page.evaluate(frame, 0.03 if i % 20 < 10 else -0.03)
        times.append(busy() - before)
    return max(times[1:])


@pytest.mark.alone
def test_a_hundred_thousand_steps_open_in_two_seconds_and_move_smoothly(opened, tmp_path):
    page = opened(write_run(tmp_path / "run", 100_000))
    took = []
    for _ in range(3):
        page.reload()
        page.locator(".u-over").first.wait_for()
        took.append(page.evaluate("new Promise(requestAnimationFrame).then(() => performance.now())"))
    assert min(took) < 2000
    assert min(busiest_frame(page) for _ in range(3)) < 50


@pytest.mark.alone
def test_twenty_runs_of_ten_thousand_steps(opened, tmp_path):
    for number in range(20):
        write_run(tmp_path / f"run-{number}", 10_000, seed=number)
    page = opened(tmp_path)
    assert page.locator("#runs li").count() == 20
    assert page.evaluate("charts[0].shown.length") == 20
    page.locator("#charts .u-over").first.hover()
    assert page.locator(".tip div").count() == 13
    assert min(busiest_frame(page) for _ in range(3)) < 50
