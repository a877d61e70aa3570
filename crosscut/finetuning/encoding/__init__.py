"""Encode a task's examples as token ids with special tokens and labels, and find answers from the scores of spans.

The package needs no torch (docs/tasks.md).
"""
