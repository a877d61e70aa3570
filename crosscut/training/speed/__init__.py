"""Compiled layers."""
