import time
from pathlib import Path

import pytest
import tomli_w
import torch

from crosscut.architecture import Product
from crosscut.calibration import calibrate
from crosscut.calibration.device import ON_CPU, Rates, Sizes, measure, rates_of, shapes, sizes_for
from crosscut.calibration.device_file import device_table
from crosscut.calibration.ranks import LinkRate, Links, joined, links, together
from crosscut.calibration.timing import in_turns, repeated, typical
from crosscut.config import ConfigError
from crosscut.launch import process_group
from crosscut.planner.hardware import KNOWN_HARDWARE, Hardware, MeasuredMessage, read_hardware
from crosscut.planner.products import Speed
from tests.timing import in_a_quiet_moment

SMALL = Sizes(tokens=(64,), widths=((64, 64), (64, 128)), elements=1 << 16, attention=(1, 2, 64, 16), turns=1)
CPU = torch.device("cpu")


def rates_here(sizes: Sizes) -> Rates:
    with process_group(CPU):
        return measure(CPU, sizes)


def test_each_shape_is_measured_as_it_is_used_forward_and_for_its_weight() -> None:
    assert shapes(SMALL) == [(64, 64, 64), (64, 64, 64), (64, 64, 128), (64, 64, 128)]


@in_a_quiet_moment
def test_rates_are_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("crosscut.calibration.device._ELSEWHERE", 1 << 18)
    rates = rates_here(SMALL)
    assert [tuple(shape) for *shape, _ in rates.measured["float32"]] == shapes(SMALL)
    assert all(0 < rate < 100 for *_, rate in rates.measured["float32"])
    assert 0.01 < rates.memory < 2000
    assert 0 < rates.attention < 100
    assert 1e-8 < rates.start < 1e-2
    forward, backward, parameter = rates.host
    assert rates.start < parameter < forward < 1  # many operators, each no less than the smallest kernel
    assert 0 <= backward < 1
    assert sizes_for(CPU) == ON_CPU


@pytest.mark.slow  # multiplies large matrices
def test_larger_products_run_at_a_higher_rate() -> None:
    """By a factor that no load on the machine undoes: the small one is all start."""
    rates = rates_here(SMALL._replace(tokens=(8, 512), widths=((8, 8), (512, 512))))
    found = {tuple(shape): rate for *shape, rate in rates.measured["float32"]}
    assert found[512, 512, 512] > 5 * found[8, 8, 8]


def test_gelu_is_what_it_takes_beyond_its_bytes() -> None:
    sizes = Sizes(tokens=(1,), widths=((1, 1),), elements=1_000_000, attention=(1, 1, 1, 1))
    memory, gelu, forward, both, optimizer = 12e6 / 20e9, 8e6 / 20e9 + 1e6 / 5e8, 1e-3, 3e-3, 480e-6
    rates = rates_of([1.0, 1.0, 1.0, memory, 1.0, gelu, forward, both, optimizer], CPU, sizes)
    assert rates.memory == pytest.approx(20.0)
    assert rates.gelu == pytest.approx(0.5)
    assert rates.host == pytest.approx((2e-3, 4e-3, 10e-6))  # of two halves; of each of 48 parameters
    hidden = rates_of([1.0, 1.0, 1.0, memory, 1.0, memory / 2, forward, both, optimizer], CPU, sizes)
    assert hidden.gelu == 0.0


def test_pieces_are_measured_in_turns_of_which_the_first_does_not_count() -> None:
    calls: list[str] = []

    def piece(name: str, seconds: float) -> list[float]:
        calls.append(name)
        return [seconds * len(calls)]

    taken = in_turns([lambda: piece("a", 1.0), lambda: piece("b", 10.0)], turns=2)
    assert calls == ["a", "b", "a", "b", "a", "b"]
    assert taken == [[[3.0], [5.0]], [[40.0], [60.0]]]


def test_a_slow_turn_does_not_count_and_a_slow_repeat_does() -> None:
    assert typical([[1.0, 3.0], [2.0, 2.0], [50.0, 50.0]]) == 2.0


@in_a_quiet_moment
def test_short_work_is_repeated_and_long_work_is_not() -> None:
    """A busy machine may hold up the first call of short work, which then counts as long."""
    calls = {0.0: 0, 0.01: 0}

    def work(seconds: float) -> None:
        calls[seconds] += 1
        time.sleep(seconds)

    turns = [repeated(lambda s=s: work(s), CPU) for s in calls]
    taken = [[once for _ in range(5) for once in turn()] for turn in turns]  # a busy machine may hold up one of five
    assert calls[0.0] > 5 * 2
    assert calls[0.01] == 5
    assert min(taken[0]) < 0.01 <= min(taken[1])


def test_the_file_must_be_a_toml_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"`--calibrate` must name a \.toml file to write, but is"):
        calibrate(tmp_path / "device.json")


def test_of_each_turn_the_slower_ranks_work_counts_and_the_later_ranks_wait() -> None:
    one, other = [[1.0, 5.0], [2.0, 2.0]], [[3.0, 4.0], [1.0, 3.0]]
    assert joined([one, other], max) == [[3.0, 5.0], [2.0, 3.0]]
    assert joined([one, other], min) == [[1.0, 4.0], [1.0, 2.0]]


def test_ranks_on_one_processor_do_in_all_what_each_does_twice() -> None:
    each = Rates({"float32": [(8, 8, 8, 1.0)]}, 2.0, 3.0, 1e-6, 4.0, (1e-3, 2e-3, 1e-5))
    assert together(each, 2) == Rates({"float32": [(8, 8, 8, 2.0)]}, 4.0, 6.0, 1e-6, 8.0, (1e-3, 2e-3, 1e-5))


def test_a_link_is_measured_for_each_operation() -> None:
    """A rank sends the whole of 4 and 40 MB for an all-reduce in two steps, a half for the others in one."""
    seconds = [2e-3, 6e-3, 82e-3, 1e-3, 2e-3, 11e-3, 1e-3, 3e-3, 41e-3]
    found = links(seconds, large=(1_000_000, 10_000_000), num_ranks=2)
    for operation, rates in {
        "all_reduce": [(4.0, 1.0), (40.0, 0.5)],
        "all_gather": [(2.0, 2.0), (20.0, 2.0)],
        "reduce_scatter": [(2.0, 1.0), (20.0, 0.5)],
    }.items():
        assert found[operation].latency_microseconds == pytest.approx(1000.0)
        assert found[operation].rates == [pytest.approx(rate) for rate in rates]


GPU_RATES = Rates(
    {"float32": [(8, 8, 8, 50.0)], "bfloat16": [(8, 8, 8, 300.0), (512, 512, 512, 700.0)]}, 400.0, 3000.0, 3e-6
)


def read_back(
    folder: Path, *, link: Links | None = None, known: Hardware | None = None, gigabytes: int = 24, ranks: int = 1
) -> Hardware:
    path = folder / "gpu.toml"
    table = device_table("GPU", GPU_RATES, link, memory=gigabytes * 10**9, ranks=ranks, known=known)
    path.write_text(tomli_w.dumps(table))
    return read_hardware(path)


def test_one_gpu_that_is_known_keeps_its_stated_peak_and_links(tmp_path: Path) -> None:
    known = KNOWN_HARDWARE["h100-sxm"]
    hardware = read_back(tmp_path, known=known, gigabytes=85)
    assert hardware.device == "cuda"
    assert hardware.flops == {**known.flops, "float32": 67e12}
    assert hardware.products_attained == pytest.approx(700 / 989)
    assert hardware.attention_attained == pytest.approx(400 / 989)
    assert (hardware.node, hardware.network, hardware.ranks_per_node) == (known.node, known.network, 8)
    assert (hardware.memory, hardware.memory_bandwidth, hardware.start) == (85e9, 3000e9, 3e-6)
    assert hardware.measured["bfloat16"][1].flops_per_second == 700e12
    assert (hardware.gelu, hardware.layer_host, hardware.tensor_host) == (0.0, (0.0, 0.0), 0.0)


def test_several_gpus_that_are_not_known_are_what_was_measured(tmp_path: Path) -> None:
    link = {
        name: LinkRate(latency_microseconds=9.0, rates=[(1.0, 40.0), (50.0, rate)])
        for name, rate in (("all_reduce", 20.0), ("all_gather", 10.0))
    }
    hardware = read_back(tmp_path, link=link, ranks=4)
    assert hardware.flops == {"float32": 50e12, "bfloat16": 700e12}
    assert (hardware.ranks_per_node, hardware.node.rate, hardware.node.latency) == (4, 20e9, pytest.approx(9e-6))
    assert hardware.node.measured["all_gather"] == MeasuredMessage(pytest.approx(9e-6), ((1e6, 40e9), (50e6, 10e9)))
    assert hardware.network is None


def test_one_gpu_that_is_not_known_has_an_assumed_link(tmp_path: Path) -> None:
    hardware = read_back(tmp_path)
    assert (hardware.ranks_per_node, hardware.node.bandwidth) == (1, 32e9)
    assert hardware.sources["node"].startswith("assumed")


@pytest.mark.slow
@pytest.mark.alone  # measures the speed of the machine
def test_a_calibration_takes_less_than_a_minute_and_is_a_device_to_plan_for(tmp_path: Path) -> None:
    path = tmp_path / "here.toml"
    start = time.monotonic()
    name = calibrate(path)
    assert time.monotonic() - start < 60
    hardware = read_hardware(path)
    assert hardware.name == name
    assert set(hardware.node.measured) == {"all_reduce", "all_gather", "reduce_scatter"}
    for message in hardware.node.measured.values():
        assert message.latency > 0
        assert len(message.rates) == 2
        assert all(rate > 0 for _, rate in message.rates)
    assert min(*hardware.layer_host, hardware.tensor_host) > 0
    assert hardware.sources["products"].startswith("measured by crosscut plan --calibrate on ")
    point = hardware.measured["float32"][-1]
    speed = Speed(hardware, "float32")
    product = Product(*point[:3])
    assert product.flops / (speed.product(product) - hardware.start) <= 1.01 * point.flops_per_second
