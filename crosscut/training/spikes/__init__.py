"""Detect loss spikes, roll back to a state before the spike, and record the batches that a run leaves out
(docs/spikes.md).
"""
