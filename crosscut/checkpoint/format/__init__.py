"""Formats of a checkpoint's files, and their readers. The readers are strict, because anybody may have written the
files.
"""
