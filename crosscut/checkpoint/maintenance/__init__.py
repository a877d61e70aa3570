"""Describe, compare and repair existing checkpoints, for the command `crosscut checkpoint`."""
