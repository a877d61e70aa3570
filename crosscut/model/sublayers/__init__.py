"""Modules of the sublayers, one file for each kind, as in `architecture.sublayers`."""
