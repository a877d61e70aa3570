"""Work of optimizers on parameters, beyond elementwise updates."""
