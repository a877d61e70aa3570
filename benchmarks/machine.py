"""What a benchmark ran on, which each one prints before its figures."""

import platform
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version

from crosscut.config.machine import available_cores, processor_name


def describe_machine(*packages: str, device: str = "") -> dict[str, str]:
    """The day, the processor or `device`, Python, and the versions of packages."""
    return {
        "date": datetime.now(tz=UTC).date().isoformat(),
        "device": device or f"{processor_name()}, {available_cores()} cores",
        "python": platform.python_version(),
        **{package: version_of(package) for package in packages},
    }


def print_machine(*packages: str, device: str = "") -> None:
    """Print the same as one line."""
    print(", ".join(f"{name} {value}" for name, value in describe_machine(*packages, device=device).items()))


def version_of(package: str) -> str:
    """A package's version, or that it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
