"""Crosscut trains transformers that are too big for one GPU. Every layer's matrices are sharded over several GPUs."""

__version__ = "0.1.0"
