"""Transformer models: decoders such as GPT-2 and Llama, and encoders such as BERT. They are built from the layers of
`parallel`, and their code does not depend on the layout.
"""

from crosscut.model.batch import Batch
from crosscut.model.cache import GenerationCache
from crosscut.model.gpt import GPT
from crosscut.model.initialization import initialize

__all__ = ["GPT", "Batch", "GenerationCache", "initialize"]
