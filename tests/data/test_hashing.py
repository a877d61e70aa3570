"""Hashes of files."""

import os

import pytest

from crosscut.data.hashing import sha256, sha256_of_all


@pytest.mark.timeout(30)
def test_a_pipe_is_not_read(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "file").write_bytes(b"")
    assert sha256(tmp_path / "file").startswith("e3b0c442")
    with pytest.raises(OSError, match="not a regular file"):
        sha256_of_all([tmp_path / "file", tmp_path / "pipe"])
