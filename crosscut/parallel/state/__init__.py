"""Parameters and gradients as distributed tensors, sharding over data ranks, and comparison of replicas."""
