"""Decoders, written as for one device from the layers of `parallel`: GPT-2, Llama and their kin."""

from crosscut.model.batch import Batch
from crosscut.model.cache import KeyValueCache
from crosscut.model.gpt import GPT
from crosscut.model.initialization import initialize

__all__ = ["GPT", "Batch", "KeyValueCache", "initialize"]
