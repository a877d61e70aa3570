"""Save checkpoints in the background: the state is copied to host memory, and the copy is written atomically."""
