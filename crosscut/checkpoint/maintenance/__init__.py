"""Description, comparison and repair of existing checkpoints, for `crosscut checkpoint`."""
