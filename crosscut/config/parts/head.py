"""Head of a model: the tokens that the model predicts, or the task that it solves."""

from types import MappingProxyType
from typing import TYPE_CHECKING

from crosscut.config.checks import Choice, shown
from crosscut.config.errors import ConfigError

if TYPE_CHECKING:
    from crosscut.config.model import ModelConfig


class HeadKind(Choice):
    """Tokens that a model predicts, or the task that it solves for a whole text."""

    NEXT_TOKEN = "next_token"  # noqa: S105 - no password
    MASKED_TOKENS = "masked_tokens"
    CLASSES = "classes"
    NUMBER = "number"
    SPANS = "spans"
    CHOICE = "choice"


PREDICTED = MappingProxyType({HeadKind.NEXT_TOKEN: "the next token", HeadKind.MASKED_TOKENS: "masked tokens"})
"""Name of the predicted tokens in messages, by the kind of head. Heads that solve a task are missing."""


def check_head(model: "ModelConfig") -> None:
    """Raise `ConfigError` for settings that do not suit the model's head."""
    if model.predicts_masked and model.is_causal:
        raise ConfigError(
            '`model.attention` must be "bidirectional" for a model that predicts masked tokens, but is "causal". '
            'Set model.attention="bidirectional", or model.head="next_token".'
        )
    kind = f'with `model.head` = "{model.head}"' if model.solves_task else f"that predicts {PREDICTED[model.head]}"
    if model.head is not HeadKind.NEXT_TOKEN:
        remedy = "Adapters are for models that predict the next token. Remove `model.lora_rank`."
        model.require_value("lora_rank", 0, f"for a model {kind}", remedy)
        remedy = "Only the logits of next tokens can be divided. Remove `model.logit_divisor`."
        model.require_value("logit_divisor", 1.0, f"for a model {kind}", remedy)
    if not model.predicts_masked:
        remedy = 'Set model.head="masked_tokens", or remove `model.sentence_order`.'
        model.require_value("sentence_order", False, f"for a model {kind}", remedy)
    for name, plain in (("tied", True), ("logit_softcap", 0.0)) if model.solves_task else ():
        remedy = f"This model has no output projection. Set model.{name}={shown(plain)}."
        model.require_value(name, plain, f"for a model {kind}", remedy)
    _check_classes(model)


def _check_classes(model: "ModelConfig") -> None:
    if model.head is HeadKind.CLASSES and model.num_classes < 2:
        raise ConfigError(
            '`model.num_classes` must be at least 2 for a model with `model.head` = "classes", but is '
            f"{model.num_classes}. Set `model.num_classes` to the number of labels."
        )
    if model.head is not HeadKind.CLASSES:
        remedy = 'Remove `model.num_classes`, or set model.head="classes".'
        model.require_value("num_classes", 0, f'for a model with `model.head` = "{model.head}"', remedy)
