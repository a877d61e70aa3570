"""Forecasts of the time of a run."""

from pathlib import Path

import pytest
import torch

from crosscut.calibration import device as calibration_device
from crosscut.calibration import own_run
from crosscut.calibration import ranks as calibration_ranks
from crosscut.data import TokenFolder
from crosscut.parallel import make_mesh
from crosscut.planner import find_hardware
from crosscut.planner.hardware import KNOWN_HARDWARE
from crosscut.planner.time import step_time
from crosscut.training.batches import samples_of
from crosscut.training.precision import resolve_on
from crosscut.training.watching import forecast
from crosscut.training.watching.forecast import expected_seconds, gain_of_one_rank, hardware_for, known_hardware
from crosscut.training.watching.throughput import PeakRate
from tests.training.jobs import CPU

SLOW, FAST = (PeakRate(name="measured", flops_per_second=rate) for rate in (1e9, 1e11))


def expected(run, *, peak=SLOW, device=CPU, done=0):
    config, samples = resolve_on(run, CPU).config, samples_of(run, TokenFolder.open(Path(run.tokens_folder)))
    return expected_seconds(config, samples, known_hardware(config, peak, device), done=done)


def test_a_batch_that_grows_takes_less_time(run_with):
    growing = ("training.batch_size=8", "training.initial_batch_size=4", "training.ramp_steps=60")
    run, whole = run_with("training.steps=100", *growing), run_with("training.steps=100", "training.batch_size=8")
    assert expected(run) == pytest.approx(0.7 * expected(whole), rel=0.15)


def measured(run, peak) -> dict:
    config = resolve_on(run, CPU).config
    samples = samples_of(run, TokenFolder.open(Path(run.tokens_folder)))
    with pytest.MonkeyPatch.context() as patch:  # smaller vectors and messages, once
        for name, value in (("_ELEMENTS", 1 << 16), ("_MESSAGES", (1 << 10, 1 << 12)), ("_TURNS", 1)):
            patch.setattr(own_run, name, value)
        patch.setattr(calibration_ranks, "_MESSAGES", 2)
        patch.setattr(calibration_device, "_ELSEWHERE", 1 << 18)
        hardware = hardware_for(config, samples, peak, make_mesh(run.layout, CPU), done=0)
    return {
        "ranks": hardware.ranks_per_node,
        "peak": hardware.flops["float32"],
        "products": [tuple(point) for point in hardware.measured.get("float32", ())],
        "messages": sorted(hardware.node.measured),
        "host": [*hardware.layer_host, hardware.tensor_host],
    }


def test_a_long_run_measures_its_own_products_and_messages_on_all_ranks(ranks, run_with):
    found, same = ranks.run(2, measured, run_with("layout.tensor=2", "training.steps=100000"), SLOW)
    assert found == same
    assert found["ranks"] == 2
    shapes = {point[:3] for point in found["products"]}
    # 4 sequences of 32 tokens. A rank has half of the 64 columns of the queries and of the 256 columns of the MLP.
    assert {(128, 64, 32), (128, 64, 128), (128, 128, 64), (64, 128, 128)} <= shapes
    assert found["messages"] == ["all_gather", "all_reduce", "reduce_scatter"]
    assert min(found["host"]) >= 0.0 < found["host"][0]


def test_a_short_run_has_the_figures_of_a_laptop(ranks, run_with):
    (found,) = ranks.run(1, measured, run_with("training.steps=4"), FAST)
    assert found["peak"] == 1e11
    assert not found["products"]


def test_time_grows_with_what_is_left_and_falls_with_the_measured_rate(run_with):
    long, short = run_with("training.steps=1000"), run_with("training.steps=500")
    assert expected(long) > 1.9 * expected(short)
    assert expected(long, done=500) == pytest.approx(expected(short), rel=0.01)
    assert expected(long, peak=FAST) < expected(long) / 10


def test_the_time_of_a_pipeline_includes_the_waiting_of_its_stages(run_with):
    """Two stages of a layer each, with two micro-batches: the stages wait for half of their working time."""
    settings = ("training.steps=1000", "training.micro_batch_size=2", "training.validate_every=0")
    piped = run_with("layout.pipeline=2", *settings)
    step = step_time(resolve_on(piped, CPU).config, KNOWN_HARDWARE["laptop"])
    assert 0.2 * step.compute < step.bubble < step.compute
    assert expected(piped) > 0.6 * expected(run_with(*settings))


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
    monkeypatch.setattr(forecast.torch.cuda, "get_device_name", lambda _: next(names))
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
def test_ranks_that_share_a_processor_cost_more_than_they_gain(run_with, monkeypatch, settings, device, is_faster):
    run = resolve_on(run_with(*settings), CPU).config
    monkeypatch.setattr(forecast.torch.cuda, "get_device_name", lambda _: "NVIDIA H100 80GB HBM3")
    gain = gain_of_one_rank(run, FAST, device)
    assert (gain > 1.05) == is_faster
    assert is_faster or gain == 1.0
