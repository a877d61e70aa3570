"""Folders of published models in which one key of one file is added, removed or changed."""
