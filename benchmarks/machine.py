"""What a benchmark ran on."""

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path


def describe_machine(*packages: str) -> dict[str, str]:
    """The processor, its cores, Python, and the versions of packages."""
    info = Path("/proc/cpuinfo")  # Linux only
    lines = info.read_text().splitlines() if info.exists() else []
    model = next((line.split(":")[1].strip() for line in lines if "model name" in line), platform.processor())
    return {
        "cpu": model,
        "cores": str(os.cpu_count()),
        "python": platform.python_version(),
        **{package: _version(package) for package in packages},
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
