"""Commands that look at the folder of a run."""
