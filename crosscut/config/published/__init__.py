"""Folders of published models: what their config files say, family by family."""
