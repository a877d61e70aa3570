"""The page of `crosscut plan --html`: what it holds, and in a real browser what it shows."""

import json
import re
from base64 import b64decode
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from crosscut.config import PRESETS, Layout, ModelConfig, RunConfig, TrainingConfig, load_run
from crosscut.planner import forecast_memory
from crosscut.planner.facts import Price, budget
from crosscut.planner.hardware import KNOWN_HARDWARE
from crosscut.planner.paper import figures
from crosscut.planner.paper.figures import page
from crosscut.planner.search import Plans, search_layouts
from crosscut.planner.time import model_flops_per_second, step_time

DGX = KNOWN_HARDWARE["v100-32gb-dgx2h"]
TENSORS = (1, 2, 4, 8, 16)


@pytest.fixture(scope="module")
def plans() -> Plans:
    run = load_run({"model": {"preset": "megatron-2.5b"}, "training": {"precision": "float16", "batch_size": 1024}})
    return search_layouts(run, DGX, 128)


@pytest.fixture(scope="module")
def text(plans: Plans) -> str:
    return page_beside(plans, [f"megatron-{size}b" for size in ("1.2", "2.5", "4.2", "8.3")])


@pytest.fixture(scope="module")
def llama() -> Plans:
    run = load_run({"model": {"preset": "llama3-8b"}, "training": {"batch_size": 32}})
    return search_layouts(run, KNOWN_HARDWARE["h100-sxm"], 8)


def forecast(*, tensor: int, micro: int, recompute: str, sharding: str) -> tuple[str, str]:
    """Memory and time of the 8.3B model as the page should tell them, from a run that is made here."""
    run = RunConfig(
        model=ModelConfig(**PRESETS["megatron-8.3b"]),
        layout=Layout(tensor=tensor, data=128 // tensor, sequence_parallel=tensor > 1, sharding=sharding),
        training=TrainingConfig(
            batch_size=1024, micro_batch_size=micro, precision="float16", recompute=recompute, device="cuda"
        ),
    )
    memory = forecast_memory(run).total / 1e9
    time = step_time(run, DGX)
    share = 100 * model_flops_per_second(run, time.total) / 130e12
    assert 1 < time.total < 999
    seconds = f"{time.total:.0f}" if time.total >= 100 else f"{float(f'{time.total:.3g}'):#.3g}"
    return f"{memory:.1f} GB" if memory >= 10 else f"{memory:.2f} GB", f"{seconds} s, {share:.1f}%"


def page_beside(plans: Plans, others: Sequence[str], **costs: Any) -> str:
    """The page of a search, with fewer models to compare the run's model with."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(figures, "_OTHERS", others)
        patch.setattr(figures, "_LARGER", {})
        return page(plans, **costs)


def stored_in(text: str) -> dict[str, Any]:
    return json.loads(re.search(r'id="data">(.*?)</script>', text, re.DOTALL)[1])  # type: ignore[index]


def test_the_page_loads_nothing(text: str) -> None:
    assert "/*" not in re.sub(r"<style>.*?</style>", "", text, flags=re.DOTALL)
    assert not re.search(r'(src|href)\s*=(?!"data:image/svg)|https?://(?!www\.w3\.org/2000/svg)|@import|url\(', text)


def test_each_distinct_layer_of_the_fastest_layout_can_be_opened(llama: Plans) -> None:
    text = page_beside(llama, ("gpt2-small",))
    layers = re.findall(r'<details><summary>(.*?)</summary><img src="data:[^,]*,(.*?)" alt="(.*?)">', text)
    best = llama.fitting[0].candidate
    assert [title.partition(":")[0] for title, *_ in layers] == ["embedding", "layers 0 to 31", "head"]
    for title, drawn, told in layers:
        svg = b64decode(drawn).decode()
        assert ElementTree.fromstring(svg).tag.endswith("svg")
        assert not re.search(r"(src|href)\s*=|https?://(?!www\.w3\.org/2000/svg)|@import|url\(", svg)
        assert f"Forward, {title} sends " in told
        assert str(best.layout) in told


def test_every_model_to_compare_with_is_on_the_page() -> None:
    run = load_run({"model": {"preset": "gpt2-small"}, "training": {"batch_size": 1}})
    stored = stored_in(page(search_layouts(run, DGX, 1)))
    assert {model["name"] for model in stored["models"]} == {*figures._OTHERS, *figures._LARGER}


def position_of(stored: dict[str, Any], name: str) -> int:
    return [model["name"] for model in stored["models"]].index(name)


def test_the_page_holds_every_setting_that_the_heads_and_the_batch_allow(plans: Plans, text: str) -> None:
    stored = stored_in(text)
    assert stored["limit"] == 32_000
    assert stored["tensors"] == list(TENSORS)
    assert len(stored["points"]) == len(plans.fitting)
    eight = position_of(stored, "megatron-8.3b")
    assert len([key for key in stored["grid"] if key.startswith(f"{eight} ")]) == 5 * 4 * 3 * 3
    twenty_heads = position_of(stored, "megatron-2.5b")
    assert len([key for key in stored["grid"] if key.startswith(f"{twenty_heads} ")]) == 3 * 4 * 3 * 3


def test_the_page_opens_on_the_fastest_layout_of_the_run(llama: Plans) -> None:
    stored, best = stored_in(page_beside(llama, ("gpt2-small", "llama3-8b"))), llama.fitting[0]
    assert stored["title"] == "llama3-8b on 8 x H100 SXM"
    assert "32 sequences per step, in bfloat16" in stored["conditions"]
    first = stored["first"]
    assert stored["models"][first["model"]] == {
        "name": "llama3-8b",
        "words": "The llama3-8b model (8.03 billion parameters, sequences of 8,192 tokens)",
    }
    cell = stored["grid"][" ".join(str(first[name]) for name in ("model", "tensor", "micro", "recompute", "sharding"))]
    assert sum(cell["memory"]) == pytest.approx(best.memory.total / 1e6)
    assert sum(cell["time"]) == pytest.approx(best.time.total * 1e3)


def test_a_model_of_ones_own_is_on_the_page() -> None:
    model = {"num_layers": 2, "hidden_size": 96, "num_heads": 6, "vocab_size": 300}
    run = load_run({"model": model, "training": {"batch_size": 12, "sequence_length": 100}})
    stored = stored_in(page_beside(search_layouts(run, KNOWN_HARDWARE["h100-sxm"], 6), ("gpt2-small",)))
    assert stored["tensors"] == [1, 2, 3, 6]
    assert stored["models"][stored["first"]["model"]]["words"].startswith("The run's model (0.000")
    assert stored["models"][stored["first"]["model"]]["words"].endswith("sequences of 100 tokens)")


@pytest.fixture(scope="module")
def processor() -> str:
    """The page of eight ranks that share a processor's 16 GB."""
    training = {"batch_size": 8, "sequence_length": 256}
    run = load_run({"model": {"preset": "gpt2-small"}, "training": training})
    plans = search_layouts(run, KNOWN_HARDWARE["laptop"], 8)
    return page_beside(plans, ("gpt2-small", "gpt2-large", "llama2-7b"))


@pytest.mark.slow
def test_ranks_that_share_a_processor_share_its_memory_on_the_page_too(processor: str) -> None:
    stored = stored_in(processor)
    assert stored["limit"] == 2_000
    assert all(point["megabytes"] <= 2_000 for point in stored["points"])


def test_shared_memory_is_told_below_the_bars(processor: str, browser: Any, tmp_path: Path) -> None:
    with showing(processor, browser, tmp_path) as shown:
        choose(shown, model=str(position_of(stored_in(processor), "gpt2-large")))
        wall = shown.locator("#wall text").all_text_contents()
        assert "GB, does not fit" in wall[1]
        assert wall[-1] == "2.00 GB"
        assert shown.locator("#wall line.limit").count() == 1
        assert shown.locator("#plan text").first.text_content() == "2.00"


def test_settings_without_a_layout_are_told(processor: str, browser: Any, tmp_path: Path) -> None:
    """A batch of 8 on 8 ranks has micro-batches of 8 only with 8 tensor ranks, which 12 heads do not allow."""
    stored = stored_in(processor)
    with showing(processor, browser, tmp_path) as shown:
        choose(shown, micro=str(stored["micros"].index(8)))
        assert (
            shown.locator("#wall-words")
            .text_content()
            .endswith("has no layout with a micro-batch of 8 on these ranks.")
        )
        assert shown.locator("#wall rect").count() == shown.locator("#time rect").count() == 0
        choose(shown, model=str(position_of(stored, "llama2-7b")))
        assert shown.locator("#tensor-value").text_content() == "8"


@pytest.fixture(scope="module")
def shown(text: str, browser: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with showing(text, browser, tmp_path_factory.mktemp("page")) as shown:
        yield shown


@contextmanager
def showing(text: str, browser: Any, folder: Path) -> Iterator[Any]:
    """The page in a browser that is offline; a message on its console is a mistake."""
    file = folder / "plan.html"
    file.write_text(text, encoding="utf-8")
    context = browser.new_context(offline=True, viewport={"width": 1200, "height": 900})
    shown, said = context.new_page(), []
    shown.on("console", lambda message: said.append(message.text))
    shown.on("pageerror", lambda error: said.append(str(error)))
    shown.goto(file.as_uri())
    yield shown
    context.close()
    assert said == []


def choose(shown: Any, **values: str) -> None:
    for name, value in values.items():
        shown.evaluate(
            "([id, value]) => { const control = document.getElementById(id); control.value = value;"
            " control.dispatchEvent(new Event('input')); }",
            [name, value],
        )


@pytest.mark.parametrize(
    ("micro", "recompute", "sharding"),
    [(1, "none", "none"), (4, "operators", "none"), (8, "full", "zero2"), (2, "none", "zero3")],
)
def test_the_sliders_show_what_the_planner_says(
    shown: Any, text: str, micro: int, recompute: str, sharding: str
) -> None:
    place = position_of(stored_in(text), "megatron-8.3b")
    choose(shown, model=str(place), micro=str((1, 2, 4, 8).index(micro)), recompute=recompute, sharding=sharding)
    wall, times = (shown.locator(f"#{name} text").all_text_contents() for name in ("wall", "time"))
    for tensor in TENSORS:
        gigabytes, seconds = forecast(tensor=tensor, micro=micro, recompute=recompute, sharding=sharding)
        assert wall[wall.index(f"tensor {tensor}") + 1].startswith(gigabytes)
        assert times[times.index(f"tensor {tensor}") + 1] == seconds


def test_the_wall_tells_the_papers_choice(shown: Any, text: str) -> None:
    """Table 1's tensor sizes are the fewest that fit 32 GB: 1, 2, 4 and 8."""
    choose(shown, micro="3", recompute="full", sharding="none")
    for billions, tensor in (("1.2", 1), ("2.5", 2), ("4.2", 4), ("8.3", 8)):
        choose(shown, model=str(position_of(stored_in(text), f"megatron-{billions}b")))
        assert f"the model fits: {tensor} with these settings" in shown.locator("#wall-words").text_content()


def test_the_wall_names_settings_with_fewer_tensor_ranks(shown: Any, text: str, plans: Plans) -> None:
    """A micro-batch of 8 without recomputation needs more tensor ranks than the layouts that fit."""
    place = position_of(stored_in(text), "megatron-2.5b")
    choose(shown, model=str(place), micro="3", recompute="none", sharding="none")
    words = shown.locator("#wall-words").text_content()
    least = min(plan.candidate.layout.tensor for plan in plans.fitting)
    assert words.endswith(
        f"tensor ranks with which the model fits: 4 with these settings, {least} with other settings."
    )
    choose(shown, model=str(place), micro="0", recompute="full", sharding="zero3")
    assert shown.locator("#wall-words").text_content().endswith(f"fits: {least} with these settings.")


def test_no_word_stands_on_the_line_of_the_limit(llama: Plans, browser: Any, tmp_path: Path) -> None:
    price = Price(2.5, "USD")
    alone = page_beside(llama, ("llama3-8b",), tokens=300e9, price=price)
    needs = budget(llama.fitting[0], 8, tokens=300e9, price=price)
    needed = f"300B tokens need {needs['days']:.1f} days and {needs['money'] / 1e3:.1f}K USD"
    with showing(alone, browser, tmp_path) as shown:
        line = shown.locator("#wall line.limit").bounding_box()
        words = [word.bounding_box() for word in shown.locator("#wall text").all()[:-1]]
        assert all(not word["x"] <= line["x"] <= word["x"] + word["width"] for word in words)
        assert any(0 < word["x"] - line["x"] < 20 for word in words)  # one would have stood there
        assert shown.locator("#time-words").text_content().endswith(f"of the peak. {needed}.")
        assert shown.locator("#plan-words").text_content().endswith(f"of the peak; {needed}.")
        assert "at 2.5 USD per device and hour" in shown.locator("#conditions").text_content()


def test_every_layout_is_a_point_that_tells_of_itself(shown: Any, plans: Plans) -> None:
    assert shown.locator("#plan circle").count() == len(plans.fitting)
    best = plans.fitting[0]
    assert shown.locator("#plan-words").text_content().startswith(f"{best.candidate.layout}, recompute")
    shown.locator("#plan circle").first.dispatch_event("pointerenter")
    slowest = plans.fitting[-1]
    assert f"{slowest.time.total:.3g} s a step" in shown.locator("#plan-words").text_content()
