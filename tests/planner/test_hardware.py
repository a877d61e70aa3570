import pytest

from crosscut.planner import HARDWARE, find_hardware

KNOWN = {
    "Tesla V100-SXM3-32GB-H": ("V100 SXM3 32 GB (DGX-2H)", 130e12),
    "Tesla V100-SXM3-32GB": ("V100 SXM 32 GB", 125e12),
    "Tesla V100-SXM2-16GB": ("V100 SXM2 16 GB", 125e12),
    "A100-SXM4-40GB": ("A100 40 GB", 312e12),
    "NVIDIA A100-SXM4-40GB": ("A100 40 GB", 312e12),
    "NVIDIA A100-SXM4-80GB": ("A100 80 GB", 312e12),
    "NVIDIA A100 80GB PCIe": ("A100 80 GB", 312e12),
    "NVIDIA H100 80GB HBM3": ("H100 SXM", 989e12),
    "NVIDIA H100 PCIe": ("H100 PCIe", 756e12),
    "NVIDIA H200": ("H200 SXM", 989e12),
    "NVIDIA B200": ("B200 SXM", 2250e12),
}


@pytest.mark.parametrize(("device_name", "expected"), KNOWN.items())
def test_device_is_found_by_the_name_that_torch_gives(device_name: str, expected: tuple[str, float]) -> None:
    hardware = find_hardware(device_name)
    assert hardware is not None
    assert (hardware.name, hardware.flops["float16"]) == expected


@pytest.mark.parametrize(
    "device_name",
    [
        "",
        "cpu",
        "NVIDIA GeForce RTX 4090",
        "NVIDIA H200 NVL",
        "NVIDIA H100 NVL",
        "NVIDIA GB200",
        "NVIDIA A100-SXM4-40GB MIG 1g.5gb",
        "NVIDIA H100 80GB HBM3 MIG 3g.40gb",
    ],
)
def test_other_devices_and_parts_of_one_have_no_peak(device_name: str) -> None:
    assert find_hardware(device_name) is None


def test_each_name_belongs_to_one_entry() -> None:
    found = [find_hardware(name) for name in KNOWN]
    assert {hardware.name for hardware in found if hardware} == {hardware.name for hardware in HARDWARE}


def test_the_papers_baseline_is_30_percent_of_peak() -> None:
    hardware = find_hardware("Tesla V100-SXM3-32GB-H")
    assert hardware is not None
    assert round(39e12 / hardware.flops["float16"], 2) == 0.30


def test_volta_has_no_bfloat16() -> None:
    volta = [hardware for hardware in HARDWARE if hardware.name.startswith("V100")]
    assert volta
    assert not any("bfloat16" in hardware.flops for hardware in volta)


def test_rates_grow_with_smaller_precisions() -> None:
    for hardware in HARDWARE:
        rates = [hardware.flops[p] for p in ("float64", "float32", "tf32", "float16") if p in hardware.flops]
        assert rates == sorted(rates)
        assert hardware.source
