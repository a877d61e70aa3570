"""Devices that the planner knows. Each device has a TOML file with its figures and the source of every figure."""

from crosscut.planner.hardware.device import Hardware, Link, MeasuredMessage, MeasuredProduct, Where
from crosscut.planner.hardware.files import (
    HARDWARE,
    KNOWN_HARDWARE,
    find_hardware,
    make_hardware,
    named_hardware,
    other_matches,
    read_hardware,
)

__all__ = [
    "HARDWARE",
    "KNOWN_HARDWARE",
    "Hardware",
    "Link",
    "MeasuredMessage",
    "MeasuredProduct",
    "Where",
    "find_hardware",
    "make_hardware",
    "named_hardware",
    "other_matches",
    "read_hardware",
]
