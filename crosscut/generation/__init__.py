"""Generate text with a trained model, on any layout."""

from crosscut.config.generation.sampling import Sampling
from crosscut.generation.decoder import Decoder
from crosscut.generation.running import Piece
from crosscut.generation.text import continue_text

__all__ = ["Decoder", "Piece", "Sampling", "continue_text"]
