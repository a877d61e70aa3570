"""`crosscut doctor`: report what the ranks of a run are doing now."""
