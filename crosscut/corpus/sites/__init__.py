"""Boilerplate that the pages of a site share: found by its repetition, and cut from the pages."""
