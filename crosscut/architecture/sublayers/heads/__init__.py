"""Heads: the steps from the last hidden states to the loss. A model has one head, which `model.head` chooses."""
