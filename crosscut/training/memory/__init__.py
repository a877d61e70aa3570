"""Recomputation and host memory: both save device memory and cost time."""
