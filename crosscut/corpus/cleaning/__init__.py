"""Cleaning repairs the text of documents: broken Unicode, control characters and line ends, and hard-wrapped lines."""
