"""Formats of a checkpoint's files, and strict readers, because anybody may have written the files."""
