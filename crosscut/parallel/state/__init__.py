"""Parameters, gradients and replicas as distributed tensors."""
