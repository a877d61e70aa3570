"""Kinds of the parts of a layer, and the settings of kinds that have a section of their own."""
