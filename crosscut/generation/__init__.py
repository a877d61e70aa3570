"""Text from a given model, on any layout."""

from crosscut.generation.sampling import Sampling, sample
from crosscut.generation.text import continue_text, generate_text

__all__ = ["Sampling", "continue_text", "generate_text", "sample"]
