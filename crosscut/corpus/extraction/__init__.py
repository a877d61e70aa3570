"""Extraction of the main text of web pages: a fast one, by rules and resiliparse, and a careful one, by trafilatura."""
