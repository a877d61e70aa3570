"""Words that describe the shape of a model to people."""

from crosscut.config import ModelConfig


def model_in_words(model: ModelConfig, parameters: str, *more: str) -> str:
    """Return the family and the size of a model in words. `parameters` is the number of parameters, and `more` are
    further sizes.
    """
    return f"{model.family}, {parameters} parameters ({'; '.join((model.size, *more))})"


def shape_in_figures(model: ModelConfig) -> str:
    """Return the number of layers, the hidden size and the number of heads of a model, for a cell of a table."""
    return f"{model.num_layers} x {model.hidden_size}, {model.num_heads}"
