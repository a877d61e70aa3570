"""Figures of a run on their way out: the files of rows, TensorBoard and other trackers, and what a rank measures."""
