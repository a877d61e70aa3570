"""Attributes of modules that a plan changes: `num_heads`, or `config.num_heads` of an object that a module holds."""

import copy
from typing import Any

from torch import nn


def value_of(module: nn.Module, attribute: str) -> object:
    """Value of an attribute, or of an attribute of an object that the module holds. None if there is none."""
    value: object = module
    for name in attribute.split("."):
        value = getattr(value, name, None)
    return value


def set_value(module: nn.Module, attribute: str, value: int) -> None:
    """Give an attribute another value. Of an object, the module gets its own copy, since other modules may hold it."""
    name, _, rest = attribute.partition(".")
    if rest:
        held: Any = copy.copy(getattr(module, name))
        held.__setattr__(rest, value)  # a config may keep the value under another name
        vars(module)[name] = held
    else:
        vars(module)[name] = value
