"""The stored hash of settings belongs to their fields and to one process."""

import os
import pickle
import subprocess
import sys
from dataclasses import replace

from crosscut.config import Layout, ModelConfig

MODEL = ModelConfig(num_layers=2, hidden_size=8, num_heads=2)
READ = """
import pickle, sys
read = pickle.load(sys.stdin.buffer)
print(hash(read) == hash(type(read)(num_layers=2, hidden_size=8, num_heads=2)))
"""


def test_equal_settings_have_equal_hashes_and_others_do_not():
    hash(MODEL)
    assert hash(replace(MODEL)) == hash(MODEL)
    assert hash(replace(MODEL, num_layers=3)) != hash(MODEL)
    assert len({Layout(tensor=2), Layout(tensor=2), Layout(tensor=4)}) == 2


def test_another_process_computes_the_hash_again():
    """The hashes of strings differ between processes, and so do the hashes of settings."""
    hash(MODEL)
    done = subprocess.run(
        [sys.executable, "-c", READ],
        input=pickle.dumps(MODEL),
        env={**os.environ, "PYTHONHASHSEED": "1"},
        capture_output=True,
        check=True,
    )
    assert done.stdout == b"True\n"
