"""Checkpoints that exist: description, comparison and repair, for `crosscut checkpoint`."""
