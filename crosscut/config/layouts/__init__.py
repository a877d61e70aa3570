"""Checks and choices of a layout that depend on the model and on the training settings."""
