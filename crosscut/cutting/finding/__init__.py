"""Finds how a plain module can be cut: which layers belong together, and what must be divided between them."""
