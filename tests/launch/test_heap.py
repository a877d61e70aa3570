"""Settings of the heap, in a process of its own."""

import subprocess
import sys
from pathlib import Path

import pytest

MODES = Path("/sys/kernel/mm/transparent_hugepage/enabled")

PROGRAM = """
import resource
import torch
from crosscut.launch import process_group
with process_group(torch.device("cpu")):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(16 << 20)
    print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.slow  # a process that imports torch
@pytest.mark.skipif(
    not MODES.exists() or "[madvise]" not in MODES.read_text(), reason="needs a kernel with huge pages where asked"
)
def test_a_large_tensor_takes_huge_pages() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 64 * 256 / 4  # a quarter of the 64 MiB in ordinary pages
