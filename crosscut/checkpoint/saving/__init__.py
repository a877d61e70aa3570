"""Saving of a checkpoint in the background: copies in host memory, and their atomic writing."""
