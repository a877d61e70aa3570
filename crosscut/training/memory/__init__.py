"""Save device memory at the cost of time: recompute activations, or offload activations and moments to host memory."""
