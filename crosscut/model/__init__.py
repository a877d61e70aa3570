"""GPT-2, written as for one device from the layers of `parallel`."""

from crosscut.model.gpt import GPT
from crosscut.model.initialization import initialize

__all__ = ["GPT", "initialize"]
