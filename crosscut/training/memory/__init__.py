"""Recomputation and host memory: fewer bytes on the device for more time."""
