"""Measurement of this machine's device: the figures that a forecast takes from a file.

Within a minute it measures the rate of matrix products by shape, of attention, of memory, and of messages between two
ranks. It writes a file like those of `crosscut.planner.hardware`, which `crosscut plan --gpu FILE` takes.
"""

from crosscut.calibration.device_file import calibrate

__all__ = ["calibrate"]
