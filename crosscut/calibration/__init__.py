"""What this machine's device really does: the figures that a forecast takes from a file, measured.

Within a minute: the rate of matrix products by shape, of attention, of memory, and of messages between two ranks. What
is written is a file like those of `crosscut.planner.hardware`, and `crosscut plan --gpu FILE` takes it.
"""

from crosscut.calibration.run import calibrate

__all__ = ["calibrate"]
