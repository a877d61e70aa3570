"""Choice of a method for computing attention over a sequence that several context ranks share.

Each of C context ranks has 1 / C of the tokens. Per layer and micro-batch, a rank receives

    gather:      the keys and values of the other ranks' tokens
    all_to_all:  the queries, keys and values of its share of the heads, and then the results of its tokens
    ring:        the same keys and values as with `gather`, in C - 1 parts; the rank holds one part at a time

With `gather` and `ring`, a rank computes attention for the queries of its own tokens. With `all_to_all`, a rank
computes attention for all tokens, with its share of the heads.
"""

from typing import NamedTuple

from crosscut.config.checks import divisors, listed, require_value
from crosscut.config.errors import LayoutError
from crosscut.config.layout import ContextAttention, Layout
from crosscut.config.layouts.limits import tensor_limits
from crosscut.config.model import ModelConfig
from crosscut.config.parts.head import HeadKind
from crosscut.config.parts.limits import Limit
from crosscut.config.training import TrainingConfig

RING_BYTES = 1 << 30
"""Limit, in bytes, for a layer's gathered keys and values together with the masks. Above this limit, `auto` prefers the
ring to the gather."""


class ContextChoice(NamedTuple):
    """A method of computing attention, and the reason why it was chosen."""

    way: ContextAttention
    """Method of computing attention. Never `auto`."""
    reason: str
    """Clause that follows "because"."""


def choose_context_attention(model: ModelConfig, layout: Layout, training: TrainingConfig) -> ContextChoice:
    """Choose how the context ranks of a run compute attention. `layout.context_attention` decides, unless it is `auto`.

    `auto` chooses all-to-all if the heads of a rank allow it without repeated keys and values, because each rank then
    runs the usual kernel on whole sequences. Otherwise, `auto` chooses the gather, or the ring if the gathered keys and
    values, with the masks of causal attention, would take more than `RING_BYTES`. With dropout, only gather and
    all-to-all work, and with a block mask, only all-to-all.
    """
    if not model.attends:
        return ContextChoice(ContextAttention.ALL_TO_ALL, "mixers with a state exchange parts of themselves for tokens")
    if layout.context_attention is not ContextAttention.AUTO:
        return ContextChoice(layout.context_attention, "`layout.context_attention` selects it")
    if model.why_whole:
        return ContextChoice(ContextAttention.ALL_TO_ALL, model.why_whole)
    heads, kv_heads = heads_of_rank(model, layout)
    if heads % layout.context == 0 and kv_heads % layout.context == 0:
        reason = f"{layout.context} context ranks divide the {kv_heads} key-value heads of a tensor rank"
        return ContextChoice(ContextAttention.ALL_TO_ALL, reason)
    gathered = _gathered_bytes(model, layout, training)
    size = f"{gathered / (1 << 20):,.1f} MiB"
    masks = "mask" if model.num_masks(training.sequence_length) == 1 else "masks"
    what = f"the gathered keys and values of a layer, with the {masks}, take {size} on each rank"
    if gathered > RING_BYTES and not model.dropout:
        return ContextChoice(ContextAttention.RING, what)
    return ContextChoice(ContextAttention.GATHER, what)


def heads_of_rank(model: ModelConfig, layout: Layout) -> tuple[int, int]:
    """Return the numbers of query heads and of key-value heads on one tensor rank."""
    return model.num_heads // layout.tensor, max(model.num_kv_heads // layout.tensor, 1)


def _gathered_bytes(model: ModelConfig, layout: Layout, training: TrainingConfig) -> int:
    """Bytes of a layer's gathered keys and values in a micro-batch, and of the masks that the layers share."""
    length, sequences = training.sequence_length, training.sequences_at_once(layout.data)
    heads, kv_heads = heads_of_rank(model, layout)
    gathered = [section.gathered for section in model.sections.values()]
    sizes = [each.of_all_heads + heads * each.of_head for each in gathered]
    if model.has_keys_of_heads:
        sizes.append(2 * kv_heads * model.head_size)
    keys_and_values = sequences * length * max(sizes)
    mask = (sequences if training.document_mask else 1) * length // layout.context * length
    return (keys_and_values + model.num_masks(length) * mask) * training.numbers.compute_bytes


def require_context(model: ModelConfig, layout: Layout) -> None:
    """Raise `LayoutError` or `ConfigError` if context ranks cannot share the sequences of a run."""
    if layout.context == 1:
        return
    if model.head is not HeadKind.NEXT_TOKEN:
        remedy = "Context parallelism is only for models that predict the next token. Remove `layout.context`."
        when = f'for a model with `model.head` = "{model.head}"'
        require_value("layout.context", layout.context, 1, when, remedy, error=LayoutError)
    _require_exchanged_parts(model, layout)
    if model.attends:
        _require_attention(model, layout)


def _require_attention(model: ModelConfig, layout: Layout) -> None:
    """Raise `LayoutError` or `ConfigError` if the context ranks cannot compute attention in the layout's way."""
    heads, _ = heads_of_rank(model, layout)
    way, is_needed = layout.context_attention, bool(model.why_whole)
    if is_needed and way not in (ContextAttention.AUTO, ContextAttention.ALL_TO_ALL):
        raise LayoutError(
            '`layout.context_attention` must be "all_to_all" for a model with `sparse_attention` in `model.layers`, '
            f'but is "{way}": {model.why_whole}. Set layout.context_attention="auto".'
        )
    if _exchanges_heads(model, layout) and heads % layout.context:
        others = "choose other layers" if is_needed else 'set layout.context_attention="auto"'
        raise LayoutError(
            f"For all-to-all attention, `layout.context` must divide the {heads} heads of a tensor rank "
            f"(`model.num_heads` {model.num_heads} / `layout.tensor` {layout.tensor}), but is {layout.context}. "
            f"Try {listed(divisors(heads))}, or {others}."
        )
    if way is ContextAttention.RING:
        remedy = (
            "The ring merges the results of several kernels, and these kernels cannot drop scores. Set "
            'layout.context_attention="auto", or model.dropout=0.'
        )
        require_value("model.dropout", model.dropout, 0, 'with layout.context_attention="ring"', remedy)


def _require_exchanged_parts(model: ModelConfig, layout: Layout) -> None:
    """Raise `LayoutError` if the context ranks cannot divide what they exchange their tokens for."""
    if (limit := _undivided(model, layout)) is not None:
        number = limit.number // layout.tensor
        raise LayoutError(
            f"`layout.context` must divide the {limit.subject.format(number)} of a tensor rank (`{limit.setting}` "
            f"{limit.number} / `layout.tensor` {layout.tensor}), but is {layout.context}. Each context rank reads "
            f"whole sequences with a part of them. Try {listed(divisors(number))}."
        )


def reason_against_exchange(model: ModelConfig, layout: Layout) -> str:
    """Return the reason why context ranks cannot exchange tokens for what a tensor rank has, as a clause. Empty if they
    can.
    """
    heads, _ = heads_of_rank(model, layout)
    subject = f"{heads} heads" if _exchanges_heads(model, layout) and heads % layout.context else ""
    if (limit := _undivided(model, layout)) is not None:
        subject = limit.subject.format(limit.number // layout.tensor)
    among = f"of a tensor rank cannot be exchanged evenly among {layout.context} context ranks"
    return f"{subject} {among}" if subject else ""


def _exchanges_heads(model: ModelConfig, layout: Layout) -> bool:
    """Whether context ranks exchange heads for tokens, as the layout says or as a kind of attention needs."""
    is_chosen = layout.context_attention is ContextAttention.ALL_TO_ALL
    return model.attends and (is_chosen or bool(model.why_whole))


def _undivided(model: ModelConfig, layout: Layout) -> Limit | None:
    """Return the first limit whose part on a tensor rank the context ranks cannot divide among themselves."""
    exchanged = (limit for limit in tensor_limits(model) if limit.over_context)
    return next((limit for limit in exchanged if limit.number // layout.tensor % layout.context), None)
