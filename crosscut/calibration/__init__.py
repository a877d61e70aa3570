"""Measurement of this machine's device, which yields the figures that a forecast needs.

Within a minute, it measures the rates of matrix products by shape, of attention, of memory, and of messages between two
ranks. The results are written to a file like those in `crosscut.planner.hardware`, for `crosscut plan --gpu FILE`.
"""

from crosscut.calibration.device_file import calibrate

__all__ = ["calibrate"]
