"""The teacher of a run: its model on the ranks, and its checks before a run starts."""
