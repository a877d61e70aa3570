"""Numbers that tensor ranks must divide, such as the number of attention heads. Each kind of part states its own. The
ranks that share experts must divide the number of experts.
"""

from collections.abc import Callable, Mapping
from math import gcd
from types import MappingProxyType

from crosscut.config.checks import divisors, listed
from crosscut.config.errors import LayoutError
from crosscut.config.layout import Layout
from crosscut.config.model import ModelConfig
from crosscut.config.parts.kinds import ATTENTIONS, MLPS, Mixer, PartKind
from crosscut.config.parts.limits import Limit


def tensor_limits(model: ModelConfig) -> tuple[Limit, ...]:
    """Return the limits of all parts of a model and of its head. Limits that ranks may share come last."""
    limits = dict.fromkeys(limit for kind in model.kinds if kind in _OF_KINDS for limit in _OF_KINDS[kind](model))
    limits |= dict.fromkeys(limit for section in model.sections.values() for limit in section.limits())
    if model.has_pooler:
        when = " for a model with a pooler"
        of_pooler = Limit(
            setting="model.hidden_size", number=model.hidden_size, subject="the pooler's width of {}", when=when
        )
        limits[of_pooler] = None
    return tuple(sorted(limits, key=lambda limit: limit.may_share))


def require_tensor_axis(model: ModelConfig, tensor: int) -> None:
    """Raise `LayoutError` if the model cannot be cut evenly over `tensor` ranks. The message lists the possible numbers
    of ranks.
    """
    limits = tensor_limits(model)
    for limit in limits:
        if not limit.allows(tensor):
            allowed = [ranks for ranks in divisors(limits[0].number) if all(each.allows(ranks) for each in limits)]
            must = f"divide {limit.name}{limit.when}" + (" or be a multiple of it" if limit.may_share else "")
            raise LayoutError(f"`layout.tensor` must {must}, but is {tensor}. Try {listed(allowed)}.")


def require_expert_axis(model: ModelConfig, layout: Layout) -> None:
    """Raise `LayoutError` if the expert ranks of the layout cannot share the model's experts evenly. The message lists
    the possible numbers of ranks.
    """
    number, ranks = model.num_experts, layout.ranks.tokens.size
    if layout.expert > 1 and not number:
        raise LayoutError(
            f"`layout.expert` must be 1 for a model without experts, but is {layout.expert}. Set layout.expert=1: all "
            f"{ranks} ranks of `layout.data` x `layout.context` then share the batch."
        )
    if number and number % layout.expert:
        raise LayoutError(
            f"`layout.expert` must divide `layout.data` x `layout.context` ({ranks}) and `model.experts.number` "
            f"({number}), but is {layout.expert}. Try {listed(divisors(gcd(ranks, number)))}."
        )


def _of_attention(model: ModelConfig) -> tuple[Limit, ...]:
    heads, kv_heads = model.num_heads, model.num_kv_heads
    return (
        Limit(setting="model.num_heads", number=heads, subject="{} attention heads"),
        Limit(setting="model.num_kv_heads", number=kv_heads, subject="{} key-value heads", may_share=True),
    )


def _of_latent_attention(model: ModelConfig) -> tuple[Limit, ...]:
    return _of_attention(model)[:1]


def _of_mlp(model: ModelConfig) -> tuple[Limit, ...]:
    return (Limit(setting="model.mlp_size", number=model.mlp_size, subject="the MLP's width of {}"),)


_OF_KINDS: Mapping[PartKind, Callable[[ModelConfig], tuple[Limit, ...]]] = MappingProxyType(
    {
        **dict.fromkeys(ATTENTIONS, _of_attention),
        Mixer.LATENT_ATTENTION: _of_latent_attention,
        **dict.fromkeys(MLPS, _of_mlp),
    }
)
"""Limits of the kinds of parts that divide numbers of the whole model."""
