"""The command `crosscut new`, which writes a run file with comments."""
