import time
from pathlib import Path

import pytest
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
from crosscut.calibration.run import together
from crosscut.config import ConfigError
from crosscut.planner.hardware import read_hardware
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
