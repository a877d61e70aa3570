"""Measure this machine's device, to obtain the figures that a forecast needs.

The measurement takes less than a minute. It covers the rates of matrix products (by shape), attention, memory, and
messages between two ranks. `calibrate` writes the results to a device file for `crosscut plan --gpu FILE`. The device
files in `crosscut.planner.hardware` have the same format.
"""

from crosscut.calibration.device_file import calibrate

__all__ = ["calibrate"]
