"""The shape of a decoder: GPT-2 by default, Llama and its kin by options."""

from dataclasses import dataclass, replace

from crosscut.config.checks import Choice, divisors, listed, require_at_least, require_fraction, resolve_choices
from crosscut.config.errors import ConfigError, LayoutError


class Positions(Choice):
    """Encoding of a token's position."""

    LEARNED = "learned"
    ROTARY = "rotary"


class NormKind(Choice):
    """Norm of the residual stream."""

    LAYER = "layer"
    RMS = "rms"


class FeedForward(Choice):
    """Feed-forward part of a layer."""

    GELU = "gelu"
    RELU2 = "relu2"
    SWIGLU = "swiglu"
    GEGLU = "geglu"


class Biases(Choice):
    """Matrices of a layer that have a bias."""

    ALL = "all"
    QKV = "qkv"
    NONE = "none"


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A decoder with a norm before attention and before the MLP.

    The defaults are the GPT-2 of the paper's section 2.2: layer norm, GeLU, learned positions, biases, tied embeddings.
    Llama is `positions = "rotary"`, `norm = "rms"`, `mlp = "swiglu"`, `biases = "none"`; Qwen2 has `biases = "qkv"`
    instead, Qwen3 `qk_norm = true` besides Llama's. Sizes of 0 take what they say.
    """

    num_layers: int
    """Transformer layers."""

    hidden_size: int
    """Width of the residual stream; a multiple of `num_heads` unless `head_size` is given."""

    num_heads: int
    """Attention heads, each with its own queries."""

    num_kv_heads: int = 0
    """Heads of keys and values, each for as many query heads: 1 is multi-query, fewer than `num_heads` grouped-query
    attention. 0 takes `num_heads`."""

    head_size: int = 0
    """Width of one head. 0 takes `hidden_size` / `num_heads`."""

    mlp_size: int = 0
    """Width between the matrices of the MLP. 0 takes four times `hidden_size`, as in GPT-2."""

    vocab_size: int = 0
    """Entries of the vocabulary; 0 takes the tokenizer's."""

    max_sequence_length: int = 1024
    """The longest sequence: as many positions are learned, or rotated by."""

    dropout: float = 0.1
    """Probability of dropping an element, at the paper's three places: embeddings, attention, residuals."""

    positions: Positions = Positions.LEARNED
    """Encoding of a token's position: `learned` adds a vector to the embedding, `rotary` rotates queries and keys."""

    rotary_base: float = 10_000.0
    """The slowest rotation's wavelength grows with it."""

    rotary_factor: float = 1.0
    """Slow rotations are this many times slower than `rotary_base` makes them, as in Llama 3.1; 1 leaves them."""

    rotary_original_length: int = 8192
    """The length that a model with a `rotary_factor` was first trained on; what turns less than once in it is slow."""

    norm: NormKind = NormKind.LAYER
    """`layer` takes off the mean and scales to unit variance, `rms` only scales."""

    norm_epsilon: float = 1e-5
    """Added to the variance, or the mean square."""

    mlp: FeedForward = FeedForward.GELU
    """`gelu` is two matrices with GeLU between them, `relu2` two matrices with squared ReLU. `swiglu` and `geglu`
    multiply by a third one's output through SiLU and through GeLU."""

    mlp_pattern: tuple[FeedForward, ...] = ()
    """Kinds of MLP of successive layers, from the values of `mlp`. The pattern repeats until every layer has one.
    Empty gives every layer the kind that `mlp` names."""

    biases: Biases = Biases.ALL
    """Which matrices of a layer have one: `all`, those of queries, keys and values (`qkv`), or `none`."""

    qk_norm: bool = False
    """Whether each head's queries and keys go through a norm of their own, as in Qwen3."""

    qk_norm_kind: NormKind = NormKind.RMS
    """Norm that `qk_norm` gives queries and keys: `rms` as in Qwen3, `layer` as in Persimmon."""

    tied: bool = True
    """Whether the output projection is the token embedding."""

    def __post_init__(self) -> None:
        for name in ("num_layers", "hidden_size", "num_heads", "max_sequence_length", "rotary_original_length"):
            require_at_least(f"model.{name}", getattr(self, name), 1)
        for name in ("vocab_size", "num_kv_heads", "head_size", "mlp_size"):
            require_at_least(f"model.{name}", getattr(self, name), 0)
        require_fraction("model.dropout", self.dropout)
        resolve_choices(self, "model")
        require_at_least("model.rotary_factor", self.rotary_factor, 1)
        for name in ("rotary_base", "norm_epsilon"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ConfigError(f"`model.{name}` must be above 0 and finite, but is {getattr(self, name)}.")
        self._resolve_heads()
        if not self.mlp_size:
            object.__setattr__(self, "mlp_size", 4 * self.hidden_size)

    def _resolve_heads(self) -> None:
        if not self.head_size:
            if self.hidden_size % self.num_heads:
                raise ConfigError(
                    f"`model.num_heads` must divide `model.hidden_size` ({self.hidden_size}), but is {self.num_heads}. "
                    f"Try {listed(d for d in divisors(self.hidden_size) if d <= 2 * self.num_heads)}."
                )
            object.__setattr__(self, "head_size", self.hidden_size // self.num_heads)
        if not self.num_kv_heads:
            object.__setattr__(self, "num_kv_heads", self.num_heads)
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"`model.num_kv_heads` must divide `model.num_heads` ({self.num_heads}), but is {self.num_kv_heads}. "
                f"Try {listed(divisors(self.num_heads))}."
            )
        if self.positions == "rotary" and self.head_size % 2:
            raise ConfigError(
                f"`model.head_size` must be even for rotary positions, which turn pairs, but is {self.head_size}."
            )

    @property
    def query_size(self) -> int:
        """Width of all heads' queries together."""
        return self.num_heads * self.head_size

    @property
    def key_value_size(self) -> int:
        """Width of all heads' keys and values together."""
        return 2 * self.num_kv_heads * self.head_size

    def mlp_of(self, layer: int) -> FeedForward:
        """Kind of MLP of a layer."""
        return self.mlp_pattern[layer % len(self.mlp_pattern)] if self.mlp_pattern else self.mlp

    @property
    def family(self) -> str:
        """Common name of the model's family."""
        return "GPT-2" if self.positions == "learned" and self.mlp == "gelu" else "Llama"

    def resized(self, hidden_size: int) -> "ModelConfig":
        """The same structure at another hidden size: what was a share of the old one is the same share of the new."""
        fits = self.query_size == self.hidden_size
        mlp_size = self.mlp_size * hidden_size // self.hidden_size // self.num_heads * self.num_heads
        return replace(
            self,
            hidden_size=hidden_size,
            head_size=0 if fits else self.head_size,
            mlp_size=0 if self.mlp_size == 4 * self.hidden_size else max(mlp_size, self.num_heads),
        )

    def shares_key_value_heads(self, tensor: int) -> bool:
        """Whether so many tensor ranks are more than there are heads of keys and values, and several hold each."""
        return tensor > self.num_kv_heads


def require_tensor_axis(model: ModelConfig, tensor: int) -> None:
    """Raise `LayoutError` where so many tensor ranks cannot cut the model evenly, with the sizes that can."""
    heads, kv_heads, mlp = model.num_heads, model.num_kv_heads, model.mlp_size
    allowed = [t for t in divisors(heads) if _cuts(kv_heads, t) and mlp % t == 0]
    if tensor in allowed:
        return
    if heads % tensor:
        what = f"divide `model.num_heads` ({heads})"
    elif mlp % tensor:
        what = f"divide `model.mlp_size` ({mlp})"
    else:
        what = f"divide `model.num_kv_heads` ({kv_heads}) or be a multiple of it"
    raise LayoutError(f"`layout.tensor` must {what}, but is {tensor}. Try {listed(allowed)}.")


def _cuts(kv_heads: int, tensor: int) -> bool:
    return kv_heads % tensor == 0 or tensor % kv_heads == 0
