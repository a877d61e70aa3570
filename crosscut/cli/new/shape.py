"""Shapes of models for a number of parameters.

The shapes keep GPT-2's proportions: the hidden size is about 64 times the number of layers, and heads have 64 elements
(128 from a hidden size of 2,048 on, as in published models of that size). Heads are smaller where a model would have an
odd number of them or fewer than four, which tensor ranks could not share.
"""

from collections.abc import Iterator
from math import log

from crosscut.config import ModelConfig
from crosscut.config.checks import Settings
from crosscut.planner.parameters import count_parameters

PROPORTION = 64
"""Hidden size divided by the number of layers, as in GPT-2 small."""

_MOST_LAYERS = 256
_LEAST_PROPORTION = 4
"""Smallest hidden size divided by the number of layers. Deeper models are slow and hard to train."""

_LEAST_HEADS = 4

_NEAR = 1.1
"""Largest factor between the asked number of parameters and that of a model which is chosen by its proportions."""

_GRIDS = ((512, 64), (1024, 128), (2048, 256), (8192, 512), (32_768, 1024))
"""Limit of the hidden size, and the distance of two hidden sizes below the limit."""


def nearest_shape(number: float, like: Settings) -> ModelConfig:
    """Return the model with about `number` parameters, the embedding included. `like` has all settings of the model
    except the sizes, with its vocabulary size.

    Each hidden size has a number of layers that comes closest to `number`. Of these models, those within 10% of
    `number` are kept, or the nearest if none is, and the one whose proportions are closest to GPT-2's is returned. The
    smallest model has one layer with a hidden size of 64.
    """
    models = [_deepest(number, {**like, **_width(hidden_size)}) for hidden_size in _hidden_sizes()]
    distances = [abs(log(count_parameters(model) / number)) for model in models]
    most = max(log(_NEAR), min(distances))
    near = [model for model, distance in zip(models, distances, strict=True) if distance <= most]
    return min(near, key=lambda model: abs(log(model.hidden_size / (PROPORTION * model.num_layers))))


def _width(hidden_size: int) -> Settings:
    sizes = (64, 32, 16) if hidden_size < 2048 else (128,)
    heads = next(number for size in sizes if (number := hidden_size // size) >= _LEAST_HEADS and number % 2 == 0)
    return {"hidden_size": hidden_size, "num_heads": heads}


def _deepest(number: float, settings: Settings) -> ModelConfig:
    """The model of this width with the number of layers that comes closest to `number` parameters."""
    one, two = (count_parameters(ModelConfig(num_layers=layers, **settings)) for layers in (1, 2))
    num_layers = 1 + round((number - one) / (two - one))
    most = min(_MOST_LAYERS, settings["hidden_size"] // _LEAST_PROPORTION)
    return ModelConfig(num_layers=min(most, max(1, num_layers)), **settings)


def _hidden_sizes() -> Iterator[int]:
    size = 0
    for limit, step in _GRIDS:
        while size < limit:
            size += step
            yield size
