"""Decoder models (GPT-2, Llama and similar), built from the layers of `parallel`. The code does not depend on the
layout.
"""

from crosscut.model.batch import Batch
from crosscut.model.cache import KeyValueCache
from crosscut.model.gpt import GPT
from crosscut.model.initialization import initialize

__all__ = ["GPT", "Batch", "KeyValueCache", "initialize"]
