import math

import pytest
import torch

from crosscut.verification.tolerance import Rounding, rounding_of, tolerance_of, unit_roundoff


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_unit_roundoff_is_half_the_distance_to_the_next_number(dtype):
    one = torch.ones((), dtype=dtype)
    gap = torch.nextafter(one.float(), torch.tensor(2.0)) - 1 if dtype is torch.float32 else None
    assert (one + 2 * unit_roundoff(dtype)).item() > 1.0
    assert (one + unit_roundoff(dtype) / 2).item() == 1.0
    assert gap is None or unit_roundoff(dtype) == gap.item() / 2


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("length", [100, 10_000])
def test_sums_in_another_order_stay_within_it_and_a_millionth_of_a_fault_does_not(dtype, length):
    """The model behind the formula, on real sums: one layer, K summands."""
    generator = torch.Generator().manual_seed(length)
    rows = torch.randn(200, length, generator=generator, dtype=dtype)
    whole, halves = rows.sum(1), rows[:, : length // 2].sum(1) + rows[:, length // 2 :].sum(1)
    one_by_one = torch.stack(list(rows.unbind(1))).cumsum(0)[-1]
    tolerance = tolerance_of(dtype, num_layers=1, num_summands=length)
    for other in (halves, one_by_one):
        assert ((whole - other).abs().max() / whole.abs().max()).item() <= tolerance
    assert tolerance < (1e-12 if dtype is torch.float64 else 1e-3)


def test_it_grows_with_the_roots_of_layers_and_summands():
    base = tolerance_of(torch.float64, num_layers=1, num_summands=10_000)
    assert tolerance_of(torch.float64, num_layers=16, num_summands=10_000) == pytest.approx(4 * base)
    assert tolerance_of(torch.float64, num_layers=1, num_summands=1_000_000) == pytest.approx(10 * base, rel=0.1)


def test_bfloat16_products_are_added_up_in_float32():
    own = 8 * 2.0**-8
    assert tolerance_of(torch.bfloat16, num_layers=1, num_summands=10_000) == pytest.approx(own, rel=0.01)
    assert math.isclose(unit_roundoff(torch.bfloat16), 2.0**-8)


def test_what_rounding_explains_is_never_more_than_half():
    narrow = rounding_of(torch.bfloat16, num_layers=9, num_summands=1)
    assert narrow.outputs == tolerance_of(torch.bfloat16, num_layers=9, num_summands=1) < 0.1
    assert narrow.gradients == 3 * narrow.outputs
    deep = rounding_of(torch.bfloat16, num_layers=81, num_summands=1)
    assert deep == Rounding(outputs=3 * narrow.outputs, gradients=0.5)
    assert rounding_of(torch.float8_e4m3fn, num_layers=9, num_summands=1) == Rounding(outputs=0.5, gradients=0.5)
