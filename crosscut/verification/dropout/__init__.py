"""Dropout in a proof: the random draws of all ranks, the rules for them, and dropout that drops by value."""
