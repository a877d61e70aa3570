"""Heads of a model: from the last hidden states to the loss and to the logits. `table` builds the head of a model."""
