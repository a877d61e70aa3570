"""Read device files in TOML: the files that come with Crosscut and the files that `crosscut plan --calibrate` writes.

`DEFAULTS` has the attained shares and the latencies that apply if a file leaves them out, with comments that explain
them.
"""

import difflib
import re
import tomllib
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from types import MappingProxyType
from typing import Any

from crosscut.config import ConfigError
from crosscut.config.checks import listed
from crosscut.config.system.files import parse_toml, read_small
from crosscut.planner.hardware.checks import SECTIONS, require_values
from crosscut.planner.hardware.device import Hardware, Link, MeasuredMessage, MeasuredProduct

DEFAULTS: Mapping[str, Mapping[str, float]] = MappingProxyType(
    {
        # Assumed: copies of large tensors on data-centre GPUs are measured between 80 and 92% of the stated rate.
        "memory": {"attained": 0.85},
        # Assumed. Dao 2023 (arXiv 2307.08691): FlashAttention 2 reaches 50 to 73% of the peak where products reach 80
        # to 90%.
        "products": {"attention_of_products": 0.7, "start_microseconds": 2.0, "multiprocessors": 0},
        # On a GPU, memory traffic hides GeLU's arithmetic and the host runs ahead. On a CPU, calibration measures both.
        "operators": {
            "gelu_gigaelements_per_second": 0.0,
            "forward_microseconds": 0.0,
            "backward_microseconds": 0.0,
            "parameter_microseconds": 0.0,
        },
        # NCCL's maintainers (github.com/NVIDIA/nccl-tests/issues/212): the protocol takes 20% of a link's rate. The
        # latencies come from NCCL's tuning model (src/graph/tuning.cc): of rings with the protocol LL128, of NVLink
        # SHARP (NVLS), and of SHARP on InfiniBand (CollNet direct).
        "node": {"attained": 0.8, "latency_microseconds": 1.9, "reducing": 0.0, "reducing_latency_microseconds": 25.0},
        "network": {
            "attained": 0.8,
            "latency_microseconds": 4.0,
            "reducing": 0.0,
            "reducing_latency_microseconds": 31.0,
        },
        "host": {"gigabytes_per_second": 0.0},
    }
)

_MOST_COMMON = {"h100": "h100-sxm"}
"""Default device for a name that is the beginning of several device names. Clouds and clusters offer H100s mostly in
servers with eight SXM modules."""


def read_hardware(path: Path) -> Hardware:
    """Read a device file. Raises `ConfigError` if the file is missing, not valid TOML, or not a device file."""
    try:
        text = read_small(path)
    except (OSError, UnicodeDecodeError):
        raise ConfigError(
            f"`--gpu` must name a known device or a device file, but the file `{path}` cannot be read. Check the "
            "path, or write a device file with `crosscut plan --calibrate FILE`."
        ) from None
    try:
        table = parse_toml(text)
    except ValueError as error:
        raise ConfigError(f"`{path}` must be valid TOML, but is not: {error}.") from None
    try:
        return make_hardware(path.stem, table)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise ConfigError(
            f"`{path}` must describe a device like the TOML files in `crosscut/planner/hardware`, but reading it "
            f"raised {error!r}. Write the file again with `crosscut plan --calibrate FILE`."
        ) from None


def make_hardware(key: str, table: Mapping[str, Any]) -> Hardware:
    """Return the device that the content `table` of a device file describes. `key` is its name for `--gpu`."""
    require_values(table)
    sections = {name: {**DEFAULTS[name], **table.get(name, {})} for name in SECTIONS}
    memory, products, operators, node, network, host = sections.values()
    return Hardware(
        key=key,
        name=table["name"],
        device=table.get("device", "cuda"),
        device_names=table.get("device_names", ""),
        memory=round(memory["gigabytes"] * 1e9),
        memory_bandwidth=memory["gigabytes_per_second"] * 1e9,
        memory_attained=memory["attained"],
        flops=MappingProxyType({name: rate * 1e12 for name, rate in products["teraflops"].items()}),
        multiprocessors=int(products["multiprocessors"]),
        products_attained=products["attained"],
        attention_attained=products.get("attention", products["attained"] * products["attention_of_products"]),
        measured=MappingProxyType(
            {
                precision: tuple(MeasuredProduct(m, k, n, rate * 1e12) for m, k, n, rate in points)
                for precision, points in products.get("measured", {}).items()
            }
        ),
        start=products["start_microseconds"] * 1e-6,
        gelu=operators["gelu_gigaelements_per_second"] * 1e9,
        layer_host=(operators["forward_microseconds"] * 1e-6, operators["backward_microseconds"] * 1e-6),
        tensor_host=operators["parameter_microseconds"] * 1e-6,
        ranks_per_node=node["ranks"],
        node=_link(node),
        network=_link(network) if "network" in table else None,
        host_bandwidth=host["gigabytes_per_second"] * 1e9,
        sources=MappingProxyType({name: table[name]["source"] for name in SECTIONS if name in table}),
    )


def _link(section: Mapping[str, Any]) -> Link:
    return Link(
        bandwidth=section["gigabytes_per_second"] * 1e9,
        attained=section["attained"],
        latency=section["latency_microseconds"] * 1e-6,
        reducing=section["reducing"],
        reducing_latency=section["reducing_latency_microseconds"] * 1e-6,
        measured=MappingProxyType(
            {
                operation: MeasuredMessage(
                    message["latency_microseconds"] * 1e-6,
                    tuple((megabytes * 1e6, rate * 1e9) for megabytes, rate in message["rates"]),
                )
                for operation, message in section.get("measured", {}).items()
            }
        ),
    )


def _known() -> Mapping[str, Hardware]:
    folder = files("crosscut.planner.hardware")
    found = [file for file in folder.iterdir() if file.name.endswith(".toml")]
    tables = {file.name.removesuffix(".toml"): tomllib.loads(file.read_text(encoding="utf-8")) for file in found}
    return MappingProxyType({key: make_hardware(key, tables[key]) for key in sorted(tables)})


KNOWN_HARDWARE = _known()
"""All devices that come with Crosscut, keyed by their name for `--gpu`."""

HARDWARE = tuple(hardware for hardware in KNOWN_HARDWARE.values() if hardware.device_names)
"""Devices of `KNOWN_HARDWARE` that `find_hardware` can find by the device name that torch reports."""


def find_hardware(device_name: str) -> Hardware | None:
    """Return the hardware for a device name from `torch.cuda.get_device_name()`, or None if the device is unknown.

    The whole name must match, because other products with the same chip (`NVIDIA H200 NVL`, `NVIDIA GB200`) and
    partitions of a chip (`... MIG 3g.40gb`) run at different rates.
    """
    name = re.sub(r"^(NVIDIA|Tesla)\s+", "", device_name.strip())
    return next((hardware for hardware in HARDWARE if re.fullmatch(hardware.device_names, name)), None)


def named_hardware(name: str) -> Hardware:
    """Return the hardware for a value of `--gpu`: the name of a known device, an unambiguous beginning of such a name,
    the name that torch reports, or the path of a device file. `h100` means the most common of the H100s.

    Raises `ConfigError` if the device is unknown, if several devices match, or if the device file is invalid. The
    message names the matching devices or the nearest one.
    """
    if name.endswith(".toml"):
        return read_hardware(Path(name))
    matching = _matching(name)
    if len(matching) == 1:
        return KNOWN_HARDWARE[matching[0]]
    if found := find_hardware(name):
        return found
    if common := _MOST_COMMON.get(_plain(name)):
        return KNOWN_HARDWARE[common]
    if matching:
        choices = listed(f"`{key}`" for key in matching)
        raise ConfigError(f"`--gpu` must name one device, but `{name}` matches {len(matching)}. Choose {choices}.")
    close = difflib.get_close_matches(name.lower(), KNOWN_HARDWARE, n=1, cutoff=0.4)
    hint = f"The nearest is `{close[0]}`." if close else f"Choose {listed(f'`{key}`' for key in KNOWN_HARDWARE)}."
    raise ConfigError(f"`--gpu` must name a known device or a .toml device file, but is `{name}`. {hint}")


def other_matches(name: str) -> list[str]:
    """Names of the devices that match a value of `--gpu`, except for the most common one, which `named_hardware`
    returns. Empty if the value matches only one device.
    """
    common = _MOST_COMMON.get(_plain(name))
    return [key for key in _matching(name) if key != common] if common else []


def _matching(name: str) -> list[str]:
    """Names of known devices that match `name`: the device with exactly this name or, if there is none, all devices
    whose names begin with `name`. The comparison ignores "NVIDIA" at the start, upper and lower case, dashes,
    underscores and spaces.
    """
    wanted = _plain(name)
    exact = [key for key in KNOWN_HARDWARE if _plain(key) == wanted]
    return exact or [key for key in KNOWN_HARDWARE if wanted and _plain(key).startswith(wanted)]


def _plain(name: str) -> str:
    return re.sub(r"^nvidia|[-_\s]", "", name.lower())
