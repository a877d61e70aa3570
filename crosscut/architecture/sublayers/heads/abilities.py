"""Abilities of a model. Commands and servers ask for an ability, and not for the kind of head or attention that gives
it.
"""

from enum import Enum, auto


class Ability(Enum):
    """Something that a model can do."""

    WRITE = auto()
    """Continue a text, token by token, and score the tokens of a text from those before them."""
    FILL = auto()
    """Predict masked tokens of a text."""
    EMBED = auto()
    """Turn a text into a vector: each token sees the whole text."""
    SOLVE = auto()
    """Solve a task for a whole text, such as to classify it."""


def abilities(*found: Ability, is_causal: bool) -> frozenset[Ability]:
    """Return the abilities of a head, and `EMBED` for a model whose tokens see the whole text."""
    return frozenset(found) if is_causal else frozenset((*found, Ability.EMBED))
