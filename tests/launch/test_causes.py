"""Failures that the machine has caused are told in words, with a remedy."""

from pathlib import Path

import pytest

import crosscut
from crosscut.launch.causes import cause_of, told_by_cause

PACKAGE = Path(crosscut.__file__).parent
STACK = f"""Traceback (most recent call last):
  File "{PACKAGE}/training/step.py", line 12, in accumulate
    loss.backward()
  File "/usr/lib/python3/site-packages/torch/_tensor.py", line 5, in backward
RuntimeError: x
"""


@pytest.mark.parametrize(
    ("kind", "text", "cause"),
    [
        ("MemoryError", "", "ran out of memory"),
        ("RuntimeError", "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried", "ran out of memory"),
        ("OutOfMemoryError", "CUDA out of memory. Tried to allocate 2.00 GiB.", "ran out of memory"),
        ("RuntimeError", "can't start new thread", "has reached the limit on processes"),
        ("BlockingIOError", "[Errno 11] Resource temporarily unavailable", "has reached the limit on processes"),
        ("OSError", "[Errno 24] Too many open files: 'x'", "has reached the limit on open files"),
        ("RuntimeError", "bind: Address already in use", "found no free port"),
    ],
)
def test_causes_are_recognized(kind, text, cause):
    found = cause_of(kind, text)
    assert found is not None
    assert found[0].startswith(cause)


def test_other_errors_keep_their_traceback():
    assert told_by_cause("rank 1 of 2", "ValueError", "the cause", STACK) == ""


def test_message_names_the_rank_and_the_innermost_line_of_crosscut():
    assert told_by_cause("rank 1 of 2", "MemoryError", "", STACK) == (
        "rank 1 of 2 ran out of memory in `crosscut/training/step.py:12` (accumulate): MemoryError. The other ranks "
        "were stopped. Try a smaller batch or model, a smaller `training.micro_batch_size`, or `training.recompute`."
    )
