"""`crosscut doctor`: what the ranks of a run do now."""
