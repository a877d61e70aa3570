"""Detection of spikes of the loss, return to a state before the spike, and the record of the batches that a run leaves
out (docs/spikes.md).
"""
