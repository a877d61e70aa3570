"""Compilation of a model's layers and loss."""
