"""Compilation of layers."""
