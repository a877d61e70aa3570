"""The machine and the versions that a benchmark ran on. Every benchmark prints them before its figures."""

import platform
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version

from crosscut.config.system.machine import available_cores, processor_name


def describe_machine(*packages: str, device: str = "") -> dict[str, str]:
    """Date, processor (or `device`), Python and the versions of these packages, by name."""
    return {
        "date": datetime.now(tz=UTC).date().isoformat(),
        "device": device or f"{processor_name()}, {available_cores()} cores",
        "python": platform.python_version(),
        **{package: version_of(package) for package in packages},
    }


def machine_line(*packages: str, device: str = "") -> str:
    """Description of `describe_machine` as one line."""
    return one_line(describe_machine(*packages, device=device))


def one_line(values: Mapping[str, object]) -> str:
    """Names and values as one line."""
    return ", ".join(f"{name} {value}" for name, value in values.items())


def print_machine(*packages: str, device: str = "") -> None:
    """Print the description of `describe_machine` as one line."""
    print(machine_line(*packages, device=device))


def version_of(package: str) -> str:
    """Version of a package, or `not installed`."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
