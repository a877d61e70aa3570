"""Attributes of modules that a plan changes: `num_heads`, or `config.num_heads` of an object that a module holds."""

import copy

from torch import nn

from crosscut.cutting.looking.states import unchanged


def value_of(module: nn.Module, attribute: str) -> object:
    """Value of an attribute, or of an attribute of an object that the module holds. None if there is none."""
    value: object = module
    for name in attribute.split("."):
        value = getattr(value, name, None)
    return value


def set_value(holder: object, attribute: str, value: object) -> None:
    """Give an attribute another value. Of an object, the module gets its own copy, since other modules may hold it."""
    name, _, rest = attribute.partition(".")
    if rest:
        held = copy.copy(getattr(holder, name))
        set_value(held, rest, value)
        value = held
    holder.__setattr__(name, value)  # a config may keep the value under another name


def can_be_set(module: nn.Module, attribute: str, value: int) -> bool:
    """Whether a module reads a value after the value was set: a property may compute another one, or refuse it."""
    with unchanged(module):
        try:
            set_value(module, attribute, value)
        except Exception:  # whatever the code of a property raises is an answer
            return False
        return value_of(module, attribute) == value
