"""Numbers that tensor ranks must divide, such as the number of attention heads. Each kind of part states its own."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from crosscut.config.checks import divisors, listed
from crosscut.config.errors import LayoutError
from crosscut.config.layers import FeedForward, Mixer, PartKind
from crosscut.config.model import ModelConfig


@dataclass(frozen=True, kw_only=True)
class Limit:
    """Number that the number of tensor ranks must divide."""

    setting: str
    """Key of the config that holds the number."""
    number: int
    subject: str
    """Words for the number, with `{}` in its place, as the subject of a sentence."""
    may_share: bool = False
    """Whether several ranks may also share one, so that the number of ranks may be a multiple of the number."""
    when: str = ""
    """Condition under which the limit applies, with a space before it."""

    @property
    def name(self) -> str:
        """Setting and number, as in "`model.num_heads` (12)"."""
        return f"`{self.setting}` ({self.number})"

    def allows(self, ranks: int) -> bool:
        """Whether this number of tensor ranks is possible."""
        return self.number % ranks == 0 or (self.may_share and ranks % self.number == 0)

    def reason_against(self, ranks: int) -> str:
        """Clause that says why this number of tensor ranks is impossible."""
        over = "or shared evenly by" if self.may_share else "evenly over"
        return f"{self.subject.format(self.number)} cannot be divided {over} {ranks} tensor ranks"


def tensor_limits(model: ModelConfig) -> tuple[Limit, ...]:
    """Return the limits of all parts of a model and of its head. Limits that ranks may share come last."""
    kinds = dict.fromkeys(kind for index in range(model.num_layers) for _, kind in model.parts_of(index))
    limits = dict.fromkeys(limit for kind in kinds for limit in _OF_KINDS[kind](model))
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


def _of_attention(model: ModelConfig) -> tuple[Limit, ...]:
    heads, kv_heads = model.num_heads, model.num_kv_heads
    return (
        Limit(setting="model.num_heads", number=heads, subject="{} attention heads"),
        Limit(setting="model.num_kv_heads", number=kv_heads, subject="{} key-value heads", may_share=True),
    )


def _of_mlp(model: ModelConfig) -> tuple[Limit, ...]:
    return (Limit(setting="model.mlp_size", number=model.mlp_size, subject="the MLP's width of {}"),)


_OF_KINDS: Mapping[PartKind, Callable[[ModelConfig], tuple[Limit, ...]]] = MappingProxyType(
    {Mixer.ATTENTION: _of_attention, **dict.fromkeys(FeedForward, _of_mlp)}
)
"""Limits of each kind of part."""
