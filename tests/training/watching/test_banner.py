import io
from pathlib import Path

import pytest
import torch
from rich.console import Console

from crosscut.data import TokenFolder
from crosscut.planner import find_hardware
from crosscut.planner.hardware import KNOWN_HARDWARE
from crosscut.planner.time import step_time
from crosscut.training.batches import samples_of
from crosscut.training.precision import resolve_on
from crosscut.training.watching import banner
from crosscut.training.watching.banner import COUNTS, expected_seconds, gain_of_one_rank, print_banner, short
from crosscut.training.watching.throughput import Peak, Throughput
from tests.training.jobs import CPU

SLOW, FAST = (
    Throughput(flops_per_token=1e6, peak=Peak(name="measured", flops_per_second=rate)) for rate in (1e9, 1e11)
)


def expected(run, *, throughput=SLOW, device=CPU, done=0):
    tokens = TokenFolder.open(Path(run.tokens_folder))
    return expected_seconds(resolve_on(run, CPU), samples_of(run, tokens), throughput, device, done=done)


def printed(run, *, done=0) -> str:
    console = Console(file=io.StringIO(), width=120)
    tokens = TokenFolder.open(Path(run.tokens_folder))
    print_banner(resolve_on(run, CPU), samples_of(run, tokens), SLOW, CPU, console, done=done)
    return console.file.getvalue()


def test_banner_says_what_will_be_trained_on_what_and_for_how_long(run_with):
    run = run_with("layout.tensor=2", "training.steps=9000", "output.folder=here")
    corpus = sum(shard.num_tokens for shard in TokenFolder.open(Path(run.tokens_folder)).train)
    text = printed(run)
    for fact in (
        "GPT-2, ", " parameters (", "vocabulary 500", "tensor 2 x data 1: 2 processes",
        f"{corpus / 1e3:.3g}k tokens for training", "9,000 steps of 4 x 32 tokens",
        f"{9000 * 128 / corpus:.3g} epochs", "here", "expected time",
    ):  # fmt: skip
        assert fact in text, fact
    assert "steps 7 to 9,000 of 4 x 32 tokens" in printed(run, done=6)


def test_a_model_of_one_layer_has_no_layers(run_with):
    text = printed(run_with("model.num_layers=1", "model.num_heads=1"))
    assert "(1 layer, hidden 64, 1 head, vocabulary 500)" in text
    assert "(2 layers, hidden 64, 4 heads, vocabulary 500)" in printed(run_with())


def test_a_batch_that_grows_is_told_and_takes_less_time(run_with):
    growing = ("training.batch_size=8", "training.initial_batch_size=4", "training.ramp_steps=60")
    run, whole = run_with("training.steps=100", *growing), run_with("training.steps=100", "training.batch_size=8")
    corpus = sum(shard.num_tokens for shard in TokenFolder.open(Path(run.tokens_folder)).train)
    text = printed(run)
    assert "100 steps of 4 to 8 x 32 tokens" in text
    assert f"{(60 * 4 + 40 * 8) * 32 / corpus:.3g} epochs" in text
    assert expected(run) == pytest.approx(0.7 * expected(whole), rel=0.15)


def test_time_grows_with_what_is_left_and_falls_with_the_measured_rate(run_with):
    long, short = run_with("training.steps=1000"), run_with("training.steps=500")
    assert expected(long) > 1.9 * expected(short)
    assert expected(long, done=500) == pytest.approx(expected(short), rel=0.01)
    assert expected(long, throughput=FAST) < expected(long) / 10


def test_the_time_of_a_pipeline_includes_the_waiting_of_its_stages(run_with):
    """Two stages of a layer each, with two micro-batches: the stages wait for half of their working time."""
    settings = ("training.steps=1000", "training.micro_batch_size=2", "training.validate_every=0")
    piped = run_with("layout.pipeline=2", *settings)
    step = step_time(resolve_on(piped, CPU).config, KNOWN_HARDWARE["laptop"])
    assert 0.2 * step.compute < step.bubble < step.compute
    assert expected(piped) > 0.6 * expected(run_with(*settings))
    assert "expected time" in printed(piped)


def test_validations_count_as_a_third_of_a_step_of_their_size(run_with):
    """A validation has 8 sequences and a step has 4. Validations run before the first step, and as often as asked."""
    rarely, often, whole = (
        expected(run_with("training.steps=100", setting))
        for setting in ("training.validate_every=0", "training.validate_every=7", "training.validation_sequences=0")
    )
    step = rarely / (100 + 2 * 2 / 3)
    assert often / step == pytest.approx(100 + 16 * 2 / 3)
    validated = TokenFolder.open(Path(run_with().tokens_folder)).validation.num_tokens
    assert whole / step == pytest.approx(100 + 35 * validated / 128 / 3)


def test_gpus_that_the_planner_knows_have_its_forecast(run_with, monkeypatch):
    run, gpu = run_with("training.validate_every=0"), torch.device("cuda", 0)
    names = iter(["NVIDIA H100 80GB HBM3", "NVIDIA T4"])
    monkeypatch.setattr(banner.torch.cuda, "get_device_name", lambda _: next(names))
    step = step_time(resolve_on(run, CPU).config, find_hardware("NVIDIA H100 80GB HBM3")).total
    assert expected(run, device=gpu) == pytest.approx(step * (6 + 2 * 2 / 3))
    assert expected(run, device=gpu) is None
    assert expected(run_with("layout.data=16", "training.batch_size=16")) is None, "more ranks than the laptop has"


@pytest.mark.parametrize(
    ("settings", "device", "is_faster"),
    [
        (["layout.tensor=2"], CPU, True),
        (["layout.data=2", "model.hidden_size=64", "training.micro_batch_size=1"], CPU, True),
        (["layout.tensor=2", "model.hidden_size=8192", "model.mlp_size=65536", "training.batch_size=64"], CPU, False),
        (["layout.tensor=1"], CPU, False),
        (["layout.tensor=2"], torch.device("cuda", 0), False),
        (["layout.data=16", "training.batch_size=16"], CPU, False),
    ],
)
def test_ranks_that_share_a_processor_cost_more_than_they_gain_in_a_small_model(run_with, settings, device, is_faster):
    run = resolve_on(run_with(*settings), CPU).config
    if device.type == "cuda":
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(banner.torch.cuda, "get_device_name", lambda _: "NVIDIA H100 80GB HBM3")
            gain = gain_of_one_rank(run, FAST.peak, device)
    else:
        gain = gain_of_one_rank(run, FAST.peak, device)
    assert (gain > 1.05) == is_faster
    assert is_faster or gain == 1.0


@pytest.mark.parametrize(
    ("number", "text"), [(999.4, "999"), (999.7, "1k"), (999_999, "1M"), (999_499, "999k"), (999_900_000, "1B")]
)
def test_a_number_is_rounded_before_its_letter_is_chosen(number, text):
    assert short(number, COUNTS) == text
