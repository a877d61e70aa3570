import tomllib
from dataclasses import fields
from pathlib import Path

import pytest
import tomli_w

from crosscut.config import ConfigError
from crosscut.planner import HARDWARE, find_hardware
from crosscut.planner.hardware import KNOWN_HARDWARE, named_hardware, other_matches, read_hardware
from tests.refusals import refusal

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


OTHERS = ("", "cpu", *(f"NVIDIA {name}" for name in ("GeForce RTX 4090", "H200 NVL", "H100 NVL", "GB200")))
PARTS = ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "NVIDIA H100 80GB HBM3 MIG 3g.40gb")


@pytest.mark.parametrize("device_name", [*OTHERS, *PARTS])
def test_other_devices_and_parts_of_one_have_no_peak(device_name: str) -> None:
    assert find_hardware(device_name) is None


def test_every_device_is_found_by_a_name() -> None:
    assert {name for name, _ in KNOWN.values()} == {hardware.name for hardware in HARDWARE}


def test_volta_has_no_bfloat16() -> None:
    volta = [hardware for hardware in HARDWARE if hardware.name.startswith("V100")]
    assert volta
    assert not any("bfloat16" in hardware.flops for hardware in volta)


def test_rates_grow_with_smaller_precisions() -> None:
    for hardware in HARDWARE:
        rates = [hardware.flops[p] for p in ("float64", "float32", "tf32", "float16") if p in hardware.flops]
        assert rates == sorted(rates)
        assert hardware.source


def test_every_figure_has_a_source() -> None:
    for hardware in KNOWN_HARDWARE.values():
        sections = {"memory", "products", "node"} | ({"network"} if hardware.network else set())
        assert sections <= set(hardware.sources)
        assert all(hardware.sources.values())


def test_the_papers_cluster_is_as_it_says() -> None:
    dgx = named_hardware("v100-32gb-dgx2h")
    assert dgx.network is not None
    assert 2 * dgx.node.bandwidth == 300e9  # section 5: inside a server
    assert dgx.ranks_per_node * dgx.network.bandwidth == 100e9  # between servers


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("h100-sxm", "h100-sxm"),
        ("H100SXM", "h100-sxm"),
        ("nvidia h100_p", "h100-pcie"),
        ("h200", "h200-sxm"),
        ("h100", "h100-sxm"),
        ("NVIDIA H100", "h100-sxm"),
        ("B200", "b200-sxm"),
        ("v100-32gb", "v100-32gb"),
        ("NVIDIA H100 80GB HBM3", "h100-sxm"),
        ("NVIDIA H200", "h200-sxm"),
    ],
)
def test_a_device_is_found_by_the_beginning_of_its_name_or_by_torchs_name(name: str, key: str) -> None:
    assert named_hardware(name).key == key


@pytest.mark.parametrize(
    ("name", "others"),
    [("H100", ["h100-pcie"]), ("h100-sxm", []), ("h200", []), ("a100", []), ("h100.toml", [])],
)
def test_a_name_that_means_the_most_common_device_fits_others_too(name: str, others: list[str]) -> None:
    assert other_matches(name) == others


@pytest.mark.parametrize(
    ("name", "message"),
    {
        "a100": "`--gpu` must name one device, but `a100` matches 2. Choose `a100-40gb` or `a100-80gb`.",
        "zzz": "`--gpu` must name a known device or a .toml device file, but is `zzz`. Choose `a100-40gb`, "
        "`a100-80gb`, `b200-sxm`, `h100-pcie`, `h100-sxm`, `h200-sxm`, `laptop`, `v100-16gb`, `v100-32gb` or "
        "`v100-32gb-dgx2h`.",
        "nowhere.toml": "`--gpu` must name a known device or a device file, but the file `nowhere.toml` cannot be "
        "read. Check the path, or write a device file with `crosscut plan --calibrate FILE`.",
    }.items(),
)
def test_a_device_that_is_not_known_is_told(name: str, message: str) -> None:
    assert refusal(ConfigError, named_hardware, name) == message


SHIPPED = Path(__file__).parents[2] / "crosscut" / "planner" / "hardware" / "h100-sxm.toml"


def test_a_file_of_ones_own_is_read_as_the_shipped_ones_are(tmp_path: Path) -> None:
    path = tmp_path / "h100-sxm.toml"
    path.write_text(SHIPPED.read_text())
    own, shipped = read_hardware(path), KNOWN_HARDWARE["h100-sxm"]
    assert all(getattr(own, field.name) == getattr(shipped, field.name) for field in fields(own))


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("ranks = 8", "ranks", "must be valid TOML, but is not: "),
        (
            "ranks = 8\n",
            "",
            "must describe a device like the TOML files in `crosscut/planner/hardware`, but reading it raised ",
        ),
        ("ranks = 8", "rank = 8", "`node.rank` must be a known key of a device file, but is not. Use attained, "),
    ],
)
def test_a_file_that_is_no_device_is_told(tmp_path: Path, before: str, after: str, message: str) -> None:
    path = tmp_path / "own.toml"
    path.write_text(SHIPPED.read_text().replace(before, after))
    assert message in refusal(ConfigError, read_hardware, path)


NO_KEY = "must be a known key of a device file, but is not. Use"
RING = "node.measured.all_reduce"


@pytest.mark.parametrize(
    ("line", "message"),
    {
        'device = "CPU"': "`device` must be 'cuda' or 'cpu', but is 'CPU'.",
        'device_names = "("': "`device_names` must be a regular expression, but is '('.",
        "name = 1": "`name` must be a string, but is 1.",
        "node.source = 2026-11-25": "`node.source` must be a string, but is datetime.date(2026, 11, 25).",
        "products.source = [1]": "`products.source` must be a string, but is [1].",
        "memory.gigabytes = -5": "`memory.gigabytes` must be a number above 0, but is -5.",
        "memory.gigabytes = true": "`memory.gigabytes` must be a number above 0, but is True.",
        "memory.gigabytes_per_second = 0": "`memory.gigabytes_per_second` must be a number above 0, but is 0.",
        "memory.attained = 0": "`memory.attained` must be a number above 0 and at most 1, but is 0.",
        "node.attained = 85": "`node.attained` must be a number above 0 and at most 1, but is 85.",
        "node.ranks = 0": "`node.ranks` must be a whole number of at least 1, but is 0.",
        "node.ranks = 2.5": "`node.ranks` must be a whole number of at least 1, but is 2.5.",
        "network.latency_microseconds = -1": "`network.latency_microseconds` must be a number of at least 0, but is "
        "-1.",
        "node.reducing = 1.5": "`node.reducing` must be a number of at least 0 and at most 1, but is 1.5.",
        "network.reducing_latency_microseconds = -1": "`network.reducing_latency_microseconds` must be a number of at "
        "least 0, but is -1.",
        "host.gigabytes_per_second = inf": "`host.gigabytes_per_second` must be a number of at least 0, but is inf.",
        "products.attention = nan": "`products.attention` must be a number above 0, but is nan.",
        "products.teraflops.float32 = -0.4": "`products.teraflops.float32` must be a number above 0, but is -0.4.",
        "products.teraflops.fp32 = 1": f"`products.teraflops.fp32` {NO_KEY} bfloat16, float16, float32, float64, "
        "float8 or tf32.",
        "products.measured.float32 = [[8, 8, 1.0]]": "`products.measured.float32[0]` must be a row [m, k, n, "
        "TFLOP/s], but is [8, 8, 1.0].",
        "products.measured.float32 = [[8, 0, 8, 1.0]]": "k of `products.measured.float32[0]` must be a number above "
        "0, but is 0.",
        "node.measured.allreduce = 1": f"`node.measured.allreduce` {NO_KEY} all_gather, all_reduce, all_to_all, "
        "reduce_scatter, send or shift.",
        f"{RING} = [9.0, 20.0]": f"`{RING}` must be a table with `latency_microseconds` and `rates`, but is [9.0, "
        "20.0]. Write the file again with `crosscut plan --calibrate FILE`.",
        f"{RING} = {{ latency_microseconds = 1, rates = [] }}": f"`{RING}.rates` must be a list of one or more rows "
        "[MB, GB/s], but is [].",
        f"{RING} = {{ latency_microseconds = 1, rates = [[1, 0]] }}": f"GB/s of `{RING}.rates[0]` must be a number "
        "above 0, but is 0.",
        f"{RING} = {{ latency_microseconds = 1, rates = [[4, 2], [1, 3]] }}": f"`{RING}.rates` must be sorted by MB, "
        "without duplicates, but its sizes in MB are [4, 1].",
        f"{RING} = {{ latency_microseconds = -1, rates = [[4, 2]] }}": f"`{RING}.latency_microseconds` must be a "
        "number of at least 0, but is -1.",
    }.items(),
)
def test_a_value_that_no_device_has_is_told(tmp_path: Path, line: str, message: str) -> None:
    table = tomllib.loads(SHIPPED.read_text())
    for key, changed in tomllib.loads(line).items():
        table[key] = {**table[key], **changed} if isinstance(changed, dict) else changed
    path = tmp_path / "own.toml"
    path.write_text(tomli_w.dumps(table))
    assert refusal(ConfigError, read_hardware, path) == message
