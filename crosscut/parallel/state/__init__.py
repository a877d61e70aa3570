"""Parameters, their gradients and their copies as distributed tensors."""
