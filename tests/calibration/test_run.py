import time
from pathlib import Path

import pytest
import tomli_w
import torch

from crosscut.calibration import calibrate
from crosscut.calibration.device import (
    ON_CPU,
    Rates,
    Sizes,
    attention_rate,
    memory_rate,
    product_rates,
    sizes_for,
    start_seconds,
)
from crosscut.calibration.ranks import LinkRate
from crosscut.calibration.run import device_table, together
from crosscut.config import ConfigError
from crosscut.planner.hardware import KNOWN_HARDWARE, Hardware, read_hardware
from crosscut.planner.products import Product, Speed

SMALL = Sizes(tokens=(64,), widths=((64, 64), (64, 128)), elements=1 << 16, attention=(1, 2, 64, 16))
CPU = torch.device("cpu")


def test_each_shape_is_measured_as_it_is_used_forward_and_for_its_weight() -> None:
    rates = product_rates(CPU, torch.float32, SMALL)
    assert [shape for *shape, _ in rates] == [[64, 64, 64], [64, 64, 64], [64, 64, 128], [64, 64, 128]]
    assert all(0 < rate < 100 for *_, rate in rates)


def test_larger_products_run_at_a_higher_rate() -> None:
    """By a factor that no load on the machine undoes: the small one is all start."""
    sizes = Sizes(tokens=(8, 512), widths=((8, 8), (512, 512)), elements=1, attention=(1, 1, 1, 1))
    rates = {tuple(shape): rate for *shape, rate in product_rates(CPU, torch.float32, sizes)}
    assert rates[512, 512, 512] > 5 * rates[8, 8, 8]


def test_rates_are_of_this_machine() -> None:
    assert 0.01 < memory_rate(CPU, ON_CPU) < 2000
    assert 0 < attention_rate(CPU, torch.float32, SMALL) < 100
    assert 1e-8 < start_seconds(CPU) < 1e-2
    assert sizes_for(CPU) == ON_CPU


def test_the_file_must_be_a_toml_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"`--calibrate` must name a \.toml file to write, but is"):
        calibrate(tmp_path / "device.json")


def test_ranks_on_one_processor_do_together_what_they_do_at_once() -> None:
    one, other = (Rates({"float32": [(8, 8, 8, rate)]}, 2 * rate, 3 * rate, 1e-6) for rate in (1.0, 2.0))
    assert together([one, other]) == Rates({"float32": [(8, 8, 8, 3.0)]}, 6.0, 9.0, 1e-6)


GPU_RATES = Rates(
    {"float32": [(8, 8, 8, 50.0)], "bfloat16": [(8, 8, 8, 300.0), (512, 512, 512, 700.0)]}, 400.0, 3000.0, 3e-6
)


def read_back(tmp_path: Path, table: dict[str, object]) -> Hardware:
    path = tmp_path / "gpu.toml"
    path.write_text(tomli_w.dumps(table))
    return read_hardware(path)


def test_one_gpu_that_is_known_keeps_its_stated_peak_and_links(tmp_path: Path) -> None:
    known = KNOWN_HARDWARE["h100-sxm"]
    hardware = read_back(tmp_path, device_table("H100", GPU_RATES, None, memory=85_000_000_000, ranks=1, known=known))
    assert hardware.device == "cuda"
    assert hardware.flops == {**known.flops, "float32": 67e12}
    assert hardware.products_attained == pytest.approx(700 / 989)
    assert hardware.attention_attained == pytest.approx(400 / 989)
    assert (hardware.node, hardware.network, hardware.ranks_per_node) == (known.node, known.network, 8)
    assert (hardware.memory, hardware.memory_bandwidth, hardware.start) == (85e9, 3000e9, 3e-6)
    assert hardware.measured["bfloat16"][1].flops_per_second == 700e12


def test_several_gpus_that_are_not_known_are_what_was_measured(tmp_path: Path) -> None:
    link = LinkRate(gigabytes_per_second=20.0, latency_microseconds=9.0)
    hardware = read_back(tmp_path, device_table("Other", GPU_RATES, link, memory=24_000_000_000, ranks=4, known=None))
    assert hardware.flops == {"float32": 50e12, "bfloat16": 700e12}
    assert (hardware.ranks_per_node, hardware.node.rate, hardware.node.latency) == (4, 20e9, pytest.approx(9e-6))
    assert hardware.network is None


def test_one_gpu_that_is_not_known_has_an_assumed_link(tmp_path: Path) -> None:
    hardware = read_back(tmp_path, device_table("Other", GPU_RATES, None, memory=24_000_000_000, ranks=1, known=None))
    assert (hardware.ranks_per_node, hardware.node.bandwidth) == (1, 32e9)
    assert hardware.sources["node"].startswith("assumed")


@pytest.mark.slow
def test_a_calibration_takes_less_than_a_minute_and_is_a_device_to_plan_for(tmp_path: Path) -> None:
    path = tmp_path / "here.toml"
    start = time.monotonic()
    name = calibrate(path)
    assert time.monotonic() - start < 60
    hardware = read_hardware(path)
    assert hardware.name == name
    assert hardware.node.bandwidth > 0
    assert hardware.node.latency > 0
    assert hardware.sources["products"].startswith("measured by crosscut plan --calibrate on ")
    point = hardware.measured["float32"][-1]
    speed = Speed(hardware, "float32")
    product = Product(*point[:3])
    assert product.flops / (speed.product(product) - hardware.start) <= 1.01 * point.flops_per_second
