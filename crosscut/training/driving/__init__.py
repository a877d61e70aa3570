"""Runs around the training loop: the driver that all commands which train share, and the preparation of a run."""
