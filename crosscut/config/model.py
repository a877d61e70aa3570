"""Shape of a transformer: GPT-2 by default; Llama, BERT and similar models through options."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cache
from types import MappingProxyType

from crosscut.config.checks import (
    MOST,
    Choice,
    Settings,
    divisors,
    listed,
    require_at_least,
    require_fraction,
    require_value,
    resolve_choices,
)
from crosscut.config.conventions import VOCABULARY_MULTIPLE
from crosscut.config.errors import ConfigError
from crosscut.config.hashed import HashedOnce
from crosscut.config.parts.experts import EXPERTS, ExpertsConfig
from crosscut.config.parts.gated_delta import GATED_DELTA, GatedDeltaConfig
from crosscut.config.parts.head import PREDICTED, HeadKind, check_head
from crosscut.config.parts.kinds import (
    ATTENTIONS,
    FeedForward,
    Mixer,
    PartKind,
    checked_layers,
    checked_places,
    parts_of,
    pattern_of,
)
from crosscut.config.parts.latent_attention import LATENT_ATTENTION, LatentAttentionConfig
from crosscut.config.parts.mamba import MAMBA, MambaConfig
from crosscut.config.parts.mamba2 import MAMBA2, Mamba2Config
from crosscut.config.parts.rotary import Positions, RotaryScaling, check_rotary, rotated_sizes
from crosscut.config.parts.section import MixerSection, OwnMatrices
from crosscut.config.parts.sliding_attention import SLIDING_ATTENTION, SlidingAttentionConfig
from crosscut.config.parts.sparse_attention import SPARSE_ATTENTION, SparseAttentionConfig
from crosscut.config.system.wording import counted

MOST_LAYERS = 10_000
"""Maximum of `model.num_layers`."""
_MOST = MappingProxyType(
    {
        "num_layers": MOST_LAYERS,
        "hidden_size": 1 << 20,
        "num_heads": 1 << 16,
        "num_kv_heads": 1 << 16,
        "head_size": 1 << 16,
        "token_types": 1 << 16,
    }
)
"""Maximum of each size that has a lower limit than `checks.MOST`. These limits are far above the sizes of the largest
known model. They bound the length of a model's list of layers, and keep the number of elements of a parameter below
2^63.
"""


class AttentionKind(Choice):
    """Tokens to which a token attends."""

    CAUSAL = "causal"
    BIDIRECTIONAL = "bidirectional"


class NormPosition(Choice):
    """Place of a part's norm: before the sublayer, after the residual sum, or on the sublayer's output."""

    BEFORE = "before"
    AFTER = "after"
    OUTPUT = "output"


class NormKind(Choice):
    """Kind of normalisation: layer norm or RMS norm."""

    LAYER = "layer"
    RMS = "rms"


class NormSpan(Choice):
    """Elements of the queries or keys of a token that a norm treats as one vector."""

    HEAD = "head"
    ALL_HEADS = "all_heads"


class Biases(Choice):
    """The matrices of a layer that have a bias."""

    ALL = "all"
    QKV = "qkv"
    NONE = "none"


@dataclass(frozen=True, kw_only=True)
class ModelConfig(HashedOnce):
    """A transformer: a stack of layers, each with attention and an MLP, with norms and residual connections.

    The defaults are the GPT-2 of the paper's section 2.2: layer norm, GeLU, learned positions, biases, tied embeddings.
    Other families differ in these options:

    - Llama: `positions = "rotary"`, `norm = "rms"`, `layers = ["attention swiglu"]`, `biases = "none"`
    - Qwen2: as Llama, with `biases = "qkv"`
    - Qwen3: as Llama, with `qk_norm = true`
    - BERT: `attention = "bidirectional"`, `norm_place = "after"`, `token_types = 2`,
      `layers = ["attention gelu_exact"]`, `head = "masked_tokens"`

    If a size may be 0, its description names the default that 0 stands for.
    """

    __hash__ = HashedOnce.__hash__

    num_layers: int
    """Number of transformer layers."""

    hidden_size: int
    """Width of the residual stream. Must be a multiple of `num_heads` unless `head_size` is given."""

    num_heads: int = 0
    """Number of attention heads. Each head has its own queries. Must be given if a layer has attention; other models
    use neither this size nor `num_kv_heads` and `head_size`."""

    num_kv_heads: int = 0
    """Number of heads of keys and values. Must divide `num_heads`: several query heads can share the keys and values of
    one head. 1 is multi-query attention; a number between 1 and `num_heads` is grouped-query attention. 0 means
    `num_heads`, which a model whose only attention is `latent_attention` always has.
    """

    head_size: int = 0
    """Width of one head. 0 means `hidden_size` / `num_heads`."""

    mlp_size: int = 0
    """Width between the matrices of the MLP. 0 means four times `hidden_size`, as in GPT-2."""

    vocab_size: int = 0
    """Number of vocabulary entries. 0 means the tokenizer's vocabulary size."""

    vocab_multiple: int = VOCABULARY_MULTIPLE
    """The weights are padded to a number of vocabulary entries that is a multiple of this number, and of 128 on each
    tensor rank. With 1024, GPT-2's 50,257 entries become the paper's 51,200 on up to 8 tensor ranks. The added entries
    get no probability."""

    max_sequence_length: int = 1024
    """Maximum number of tokens in a sequence, and number of positions."""

    dropout: float = 0.1
    """Dropout probability at the paper's three places: embeddings, attention, residuals."""

    attention: AttentionKind = AttentionKind.CAUSAL
    """Tokens to which a token attends: `causal` means itself and the tokens before it, as in GPT; `bidirectional` means
    all tokens of the sequence except padding, as in BERT.
    """

    attention_gate: bool = False
    """Whether the result of each head is multiplied by the sigmoid of a gate before the output projection, as in
    Qwen3-Next. The projection to queries then has twice as many rows: for each head, first its query and then its gate.
    """

    positions: Positions = Positions.LEARNED
    """Encoding of a token's position: `learned` adds a vector to the embedding; `rotary` rotates queries and keys,
    except those of `nope_attention`. With `none`, only the causal mask and the state of mixers such as `mamba2` tell
    the order of the tokens.
    """

    token_types: int = 0
    """Number of token types, such as 2 in BERT for the tokens of a first and of a second sentence. Each type has a
    learned vector that is added to the embedding. 0 means that tokens have no types.
    """

    rotary_base: float = 10_000.0
    """Base of the rotary frequencies (theta)."""

    rotary_fraction: float = 1.0
    """Fraction of the elements of each head that rotary positions rotate, such as 0.5 in Bamba and 0.25 in Qwen3-Next.
    The first elements of a head are rotated.
    """

    rotary_factor: float = 1.0
    """Factor by which `rotary_scaling` reduces rotary frequencies: about the longest sequence divided by
    `rotary_original_length`. 1 leaves all frequencies unchanged.
    """

    rotary_scaling: RotaryScaling = RotaryScaling.LLAMA3
    """Rule by which `rotary_factor` reduces rotary frequencies. `llama3` (Llama 3.1) and `yarn` divide low frequencies
    and leave high ones unchanged; `yarn` also enlarges the attention scores. `linear` divides all frequencies.
    `dynamic` raises `rotary_base` with the length of the sequences, if these are longer than `rotary_original_length`.
    """

    rotary_original_length: int = 8192
    """Sequence length, in tokens, with which the model was trained before `rotary_factor` was applied. `llama3` divides
    a frequency that makes less than 1 turn within this length, and leaves a frequency above 4 turns unchanged; for
    `yarn`, the limits are 1 and 32 turns. `linear` does not use this length.
    """

    rotary_attention_factor: float = 0.0
    """Factor by which `yarn` multiplies the rotated queries and the rotated keys. 0 means 0.1 ln(`rotary_factor`) + 1,
    as in the YaRN paper.
    """

    norm: NormKind = NormKind.LAYER
    """Norm: `layer` subtracts the mean and scales to unit variance; `rms` only scales."""

    norm_place: NormPosition = NormPosition.BEFORE
    """Place of the norms: `before` attention and the MLP, as in GPT-2, with one more norm after the last layer;
    `after` their residual sums, as in the original BERT, with one more norm of the embedding; or on their `output`,
    before the residual sum, as in OLMo 2, with one more norm after the last layer.
    """

    norm_places: tuple[str, ...] = ()
    """Place of the norms in each layer of a model whose layers differ in it, such as ["before", "output"]: a list that
    is repeated like `layers`. OLMo hybrid has the norms of layers with a gated delta net before the parts, and those of
    layers with attention on the outputs. Empty means `norm_place` in all layers.
    """

    norm_epsilon: float = 1e-5
    """Constant that a norm adds to the variance or the mean square, to avoid a division by zero."""

    norm_affine: bool = True
    """Whether norms have learned parameters: a weight, and in layer norms also a bias. This also applies to the norms
    of `qk_norm`."""

    norm_offset: bool = False
    """Whether norms multiply by 1 + their weight instead of the weight, as in Qwen3-Next. The weights then begin at 0.
    This also applies to the norms of `qk_norm` and to those of the vectors of `mamba`, but not to gated norms and to
    the norms of latents. Needs RMS norms.
    """

    embedding_norm: bool = False
    """Whether the embeddings of tokens and positions pass through a norm before the first layer. With `norm_place =
    "after"`, embeddings always pass through a norm.
    """

    layers: tuple[str, ...] = ("attention gelu",)
    """Parts of the layers, by the names of their kinds: each entry is a layer, and its parts, which are separated by
    spaces, run in this order. The list is repeated until every layer has an entry; the last repetition may be
    incomplete. A layer may have one part, or several.

    `attention` is self-attention; `sliding_attention` attends only to the last tokens ([model.sliding_attention]),
    `sparse_attention` only to some blocks of tokens ([model.sparse_attention]), and `nope_attention` rotates no queries
    and keys. `latent_attention` computes queries, keys and values from narrower vectors ([model.latent_attention]).
    `mamba` and `mamba2` are state-space mixers ([model.mamba] and [model.mamba2]), and `gated_delta` is a gated delta
    net ([model.gated_delta]). `experts` is a mixture of experts ([model.experts]).
    The other kinds are MLPs: `gelu`, `gelu_exact` and `relu2` have two matrices, with GeLU or squared ReLU between the
    matrices. `gelu` is GPT-2's tanh approximation of GeLU, and `gelu_exact` is GeLU itself, as in BERT. `swiglu` and
    `geglu` have a third matrix as a gate: its output passes through SiLU (`swiglu`) or GeLU (`geglu`) and is multiplied
    by the output of the first matrix.
    """

    mamba: MambaConfig = MAMBA
    """Settings of state-space mixers of the first kind (the section [model.mamba])."""

    mamba2: Mamba2Config = MAMBA2
    """Settings of state-space mixers (the section [model.mamba2])."""

    sliding_attention: SlidingAttentionConfig = SLIDING_ATTENTION
    """Settings of attention with a sliding window (the section [model.sliding_attention])."""
    sparse_attention: SparseAttentionConfig = SPARSE_ATTENTION
    """Settings of attention with a block mask (the section [model.sparse_attention])."""
    latent_attention: LatentAttentionConfig = LATENT_ATTENTION
    """Settings of latent attention (the section [model.latent_attention])."""
    gated_delta: GatedDeltaConfig = GATED_DELTA
    """Settings of gated delta nets (the section [model.gated_delta])."""
    experts: ExpertsConfig = EXPERTS
    """Settings of mixtures of experts (the section [model.experts])."""

    biases: Biases = Biases.ALL
    """Matrices of a layer that have a bias: `all`, only those of queries, keys and values (`qkv`), or `none`."""

    qk_norm: bool = False
    """Whether the queries and keys of each head pass through an additional norm, as in Qwen3."""

    qk_norm_kind: NormKind = NormKind.RMS
    """Norm of queries and keys under `qk_norm`: `rms` as in Qwen3, `layer` as in Persimmon."""

    qk_norm_over: NormSpan = NormSpan.HEAD
    """Vector that the norm of `qk_norm` normalises: the queries or the keys of each `head`, or those of `all_heads`
    together, as in OLMo 2.
    """

    tied: bool = True
    """Whether the output projection shares its weight with the token embedding."""

    head: HeadKind = HeadKind.NEXT_TOKEN
    """Tokens that the model predicts: `next_token` (each token from the tokens before it, as in GPT) or `masked_tokens`
    (masked tokens from the tokens on both sides, as in BERT). The head for masked tokens has a dense layer, GeLU and a
    norm before the output projection, and a bias of the logits. This head needs bidirectional attention. Four heads
    solve a task instead: `classes` (the class of a text), `number` (a number, such as the similarity of two texts),
    `spans` (the first and the last token of an answer in a text) and `choice` (the right one of several texts). These
    models have no output projection.
    """

    num_classes: int = 0
    """Number of classes of a model with `head = "classes"`. 0 for other heads."""

    sentence_order: bool = False
    """Whether the model also predicts, from its first token, whether two segments are in the order of their text or
    swapped. Needs `head = "masked_tokens"`.
    """

    logit_softcap: float = 0.0
    """Soft cap on the absolute value of the logits: each logit becomes cap x tanh(logit / cap), as in Gemma 2. 0 means
    no cap."""

    embedding_multiplier: float = 1.0
    """Factor by which the token embedding is multiplied, as in Granite."""

    residual_multiplier: float = 1.0
    """Factor by which the result of each part is multiplied before its residual sum, as in Granite."""

    attention_multiplier: float = 0.0
    """Factor of the attention scores, as in Granite. 0 means 1 / sqrt(`head_size`)."""

    logit_divisor: float = 1.0
    """Number by which the logits are divided, as in Granite."""

    lora_rank: int = 0
    """Rank of the low-rank adapters (LoRA) of every matrix in the layers, except experts and routers. With adapters,
    only the adapters train, and all other weights stay as they are. 0 means no adapters (docs/lora.md)."""

    lora_alpha: float = 0.0
    """Scale of the adapters: the product of an adapter is multiplied by `lora_alpha` / `lora_rank`. 0 means twice
    `lora_rank`."""

    def __post_init__(self) -> None:
        resolve_choices(self, "model")
        object.__setattr__(self, "layers", checked_layers(self.layers))
        self._resolve_norms()
        for name in ("num_layers", "hidden_size", "num_heads", "max_sequence_length", "rotary_original_length"):
            least = 0 if name == "num_heads" and not self.attends else 1
            require_at_least(f"model.{name}", getattr(self, name), least, maximum=_MOST.get(name, MOST))
        for name in ("vocab_size", "num_kv_heads", "head_size", "mlp_size", "token_types", "num_classes"):
            require_at_least(f"model.{name}", getattr(self, name), 0, maximum=_MOST.get(name, MOST))
        require_at_least("model.vocab_multiple", self.vocab_multiple, 1, maximum=1 << 20)
        require_fraction("model.dropout", self.dropout)
        for name, kind in mixer_sections().items():
            if isinstance(recorded := getattr(self, name), Mapping):  # as a checkpoint records it
                object.__setattr__(self, name, kind(**recorded))
        for name, least in (("rotary_factor", 1), ("rotary_attention_factor", 0)):
            require_at_least(f"model.{name}", getattr(self, name), least)
        require_at_least("model.logit_softcap", self.logit_softcap, 0)
        require_at_least("model.attention_multiplier", self.attention_multiplier, 0)
        self._resolve_adapters()
        for name in ("rotary_base", "norm_epsilon", "embedding_multiplier", "residual_multiplier", "logit_divisor"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ConfigError(f"`model.{name}` must be above 0 and finite, but is {getattr(self, name)}.")
        check_head(self)
        self._resolve_heads()
        check_rotary(self)
        self._resolve_sections()
        if not self.mlp_size:
            object.__setattr__(self, "mlp_size", 4 * self.hidden_size)

    def _resolve_norms(self) -> None:
        places = checked_places(self.norm_places) if self.norm_places else ()
        if places:
            self.require_value("norm_place", NormPosition.BEFORE, "with `model.norm_places`", "Remove one of the two.")
        if len(places) == 1:
            object.__setattr__(self, "norm_place", NormPosition(places[0]))
        object.__setattr__(self, "norm_places", places if len(places) > 1 else ())
        if self.norm_offset:
            when = "for a model with `model.norm_offset`"
            self.require_value("norm", NormKind.RMS, when, "Remove `model.norm_offset`.")
            self.require_value("norm_affine", True, when, "Remove `model.norm_offset`.")
            if self.qk_norm:
                self.require_value("qk_norm_kind", NormKind.RMS, when, 'Set model.qk_norm_kind="rms".')
                self.require_value("qk_norm_over", NormSpan.HEAD, when, 'Set model.qk_norm_over="head".')

    def _resolve_adapters(self) -> None:
        require_at_least("model.lora_rank", self.lora_rank, 0, maximum=_MOST["hidden_size"])
        require_at_least("model.lora_alpha", self.lora_alpha, 0)
        if self.lora_alpha and not self.lora_rank:
            raise ConfigError(
                "`model.lora_rank` must be at least 1 if `model.lora_alpha` is set, but is 0. Set model.lora_rank=16, "
                "or remove `model.lora_alpha`."
            )
        if not self.lora_alpha:
            object.__setattr__(self, "lora_alpha", 2.0 * self.lora_rank)

    def require_value(self, field: str, wanted: object, when: str, do: str) -> None:
        """Raise `ConfigError` unless a field has the only possible value, `wanted` (`checks.require_value`)."""
        require_value(f"model.{field}", getattr(self, field), wanted, when, do)

    def _resolve_heads(self) -> None:
        if not self.num_kv_heads:
            object.__setattr__(self, "num_kv_heads", self.num_heads)
        if not self.has_keys_of_heads:
            for name in ("qk_norm", "attention_gate"):
                when = "for a model whose layers have no `attention`"
                self.require_value(name, False, when, f"Remove `model.{name}`.")
            object.__setattr__(self, "num_kv_heads", self.num_heads)  # as latent attention computes them
        if not self.attends:
            return
        if not self.head_size:
            if self.hidden_size % self.num_heads:
                step = 2 * self.num_heads  # rotary positions need heads of even sizes
                below = self.hidden_size // step * step
                raise ConfigError(
                    f"`model.num_heads` must divide `model.hidden_size` ({self.hidden_size}), but is {self.num_heads}. "
                    f"Try {listed(d for d in divisors(self.hidden_size) if d <= 2 * self.num_heads)}, or a hidden size "
                    f"of {listed(size for size in (below, below + step) if size)}."
                )
            object.__setattr__(self, "head_size", self.hidden_size // self.num_heads)
        if self.qk_norm_over is NormSpan.ALL_HEADS:
            over = 'with `model.qk_norm_over` = "all_heads"'
            self.require_value("qk_norm", True, over, "Set model.qk_norm=true.")
            self.require_value("qk_norm_kind", NormKind.RMS, over, 'Set model.qk_norm_kind="rms".')
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"`model.num_kv_heads` must divide `model.num_heads` ({self.num_heads}), but is {self.num_kv_heads}. "
                f"Try {listed(divisors(self.num_heads))}."
            )

    def _resolve_sections(self) -> None:
        for name in (str(kind) for kind in self.kinds if kind in mixer_sections()):
            section: MixerSection = getattr(self, name)
            if section.why_causal and not self.is_causal:
                raise ConfigError(
                    f'`model.attention` must be "causal" for a model with `{name}` in `model.layers`, but is '
                    f'"bidirectional": {section.why_causal}. Set model.attention="causal", or choose other layers.'
                )
        for name, own in self.sections.items():
            object.__setattr__(self, name, own.resolved(self.hidden_size))

    @property
    def rotary_size(self) -> int:
        """Number of elements of a head that rotary positions rotate; 0 if no kind of layer rotates."""
        return next(iter(rotated_sizes(self).values()), 0)

    @property
    def attends(self) -> bool:
        """Whether a layer has attention of any kind."""
        return self.has_keys_of_heads or Mixer.LATENT_ATTENTION in self.kinds

    @property
    def has_keys_of_heads(self) -> bool:
        """Whether a layer projects hidden states to keys and values of `head_size` elements."""
        return any(kind in ATTENTIONS for kind in self.kinds)

    @property
    def windows(self) -> tuple[int, ...]:
        """Numbers of tokens to which layers with a sliding window attend; empty without such layers."""
        return (self.sliding_attention.window,) if Mixer.SLIDING_ATTENTION in self.kinds else ()

    @property
    def block_size(self) -> int:
        """Number of tokens of a block in layers with a block mask; 0 without such layers."""
        return self.sparse_attention.block_size if Mixer.SPARSE_ATTENTION in self.kinds else 0

    def num_masks(self, length: int) -> int:
        """Return the number of different masks of causal attention in the layers. A window of at least `length` tokens
        hides nothing in a sequence of this length, as attention without a window does. Masks of blocks are not stored.
        """
        without = {*ATTENTIONS, Mixer.LATENT_ATTENTION} - {Mixer.SLIDING_ATTENTION, Mixer.SPARSE_ATTENTION}
        spans = [window if window < length else 0 for window in self.windows]
        return len({*spans, *(0 for kind in self.kinds if kind in without)})

    def with_windows_in(self, length: int) -> "ModelConfig":
        """Return the model with windows of at most half of `length` tokens and blocks of at most an eighth, which hide
        tokens of sequences of this length.
        """
        windows = [min(window, max(length // 2, 1)) for window in self.windows]
        sections = [replace(self.sliding_attention, window=window) for window in windows]
        model = replace(self, sliding_attention=sections[0]) if sections else self
        return replace(model, sparse_attention=self.sparse_attention.in_length(length)) if self.block_size else model

    @property
    def why_whole(self) -> str:
        """Reason why context ranks must exchange heads for the tokens of whole sequences; empty if they need not."""
        kinds = (str(kind) for kind in self.kinds if kind in mixer_sections())
        sections: list[MixerSection] = [getattr(self, name) for name in kinds]
        return next((section.why_whole for section in sections if section.why_whole), "")

    @property
    def in_windows(self) -> "ModelConfig":
        """Model whose rotary frequencies are those of the layers with a sliding window."""
        section = self.sliding_attention
        model = replace(self, rotary_base=section.rotary_base or self.rotary_base)
        if section.rotary_scaled:
            return model
        unscaled: Settings = {
            "rotary_factor": 1.0,
            "rotary_scaling": RotaryScaling.LLAMA3,
            "rotary_attention_factor": 0.0,
        }
        return replace(model, **unscaled)

    @property
    def generation_length(self) -> int:
        """Maximum length, in tokens, of a text that the model can continue with a key-value cache. With dynamic
        scaling, the maximum is at most `rotary_original_length`. In a longer text, each new token changes the rotations
        of all keys, but the cache holds rotated keys.
        """
        if self.rotary_scaling is RotaryScaling.DYNAMIC:
            return min(self.max_sequence_length, self.rotary_original_length)
        return self.max_sequence_length

    @property
    def query_size(self) -> int:
        """Width of the queries of all heads together."""
        return self.num_heads * self.head_size

    @property
    def key_value_size(self) -> int:
        """Width of the keys and values of all heads together."""
        return 2 * self.num_kv_heads * self.head_size

    def layer(self, index: int) -> str:
        """Return the entry of `layers` for the layer with this index."""
        return self.layers[index % len(self.layers)]

    def norm_place_of(self, index: int) -> NormPosition:
        """Return the place of the norms in the layer with this index."""
        places = self.norm_places or (self.norm_place,)
        return NormPosition(places[index % len(places)])

    def parts_of(self, index: int) -> tuple[tuple[str, PartKind], ...]:
        """Return the name and the kind of each part of the layer with this index."""
        return parts_of(self.layer(index))

    @property
    def different_layers(self) -> tuple[str, ...]:
        """Different entries of `layers` that the model uses, in the order of their first use."""
        return tuple(dict.fromkeys(self.layers[: self.num_layers]))

    @property
    def entries(self) -> tuple[tuple[str, NormPosition], ...]:
        """Entry of `layers` and place of the norms of each layer."""
        return tuple((self.layer(index), self.norm_place_of(index)) for index in range(self.num_layers))

    @property
    def pattern(self) -> str:
        """Layers of the model in words (`pattern_of`)."""
        return pattern_of([self.layer(index) for index in range(self.num_layers)])

    @property
    def kinds(self) -> tuple[PartKind, ...]:
        """Kinds of the parts of the model's layers, in the order of their first use."""
        return tuple(dict.fromkeys(kind for layer in self.different_layers for _, kind in parts_of(layer)))

    @property
    def sections(self) -> dict[str, OwnMatrices]:
        """Settings of the kinds of mixers in the model that have matrices of their own, by the names of the kinds."""
        found = {str(kind): getattr(self, kind, None) for kind in self.kinds}
        return {name: section for name, section in found.items() if isinstance(section, OwnMatrices)}

    @property
    def num_experts(self) -> int:
        """Number of experts of a layer. 0 for a model without experts."""
        return self.experts.number if FeedForward.EXPERTS in self.kinds else 0

    @property
    def is_causal(self) -> bool:
        """Whether a token attends only to itself and to earlier tokens."""
        return self.attention is AttentionKind.CAUSAL

    @property
    def predicts_masked(self) -> bool:
        """Whether the model predicts masked tokens."""
        return self.head is HeadKind.MASKED_TOKENS

    @property
    def solves_task(self) -> bool:
        """Whether the model solves a task for a whole text, and does not predict tokens."""
        return self.head not in PREDICTED

    @property
    def has_pooler(self) -> bool:
        """Whether the model has a pooler: a dense layer and tanh on the first token, as in BERT."""
        pools = self.solves_task and self.head is not HeadKind.SPANS and not self.is_causal
        return self.sentence_order or pools

    @property
    def norms_embedding(self) -> bool:
        """Whether the embedding passes through a norm."""
        return self.embedding_norm or self.norm_place is NormPosition.AFTER

    @property
    def family(self) -> str:
        """Name of the model's family for display. With mixers other than attention: the kind's name, or "hybrid" with
        several kinds. Otherwise "BERT" with bidirectional attention, "GPT-2" with learned positions, "NanoChat" if the
        norms have no weights, and "Llama" if they have.
        """
        mixers = [kind for kind in self.kinds if isinstance(kind, Mixer)]
        if any(kind not in ATTENTIONS for kind in mixers):
            return str(mixers[0]) if len(mixers) == 1 else "hybrid"
        if not self.is_causal:
            return "BERT"
        if self.positions is Positions.LEARNED:
            return "GPT-2"
        return "Llama" if self.norm_affine else "NanoChat"

    @property
    def size(self) -> str:
        """Sizes of the model for display, such as "2 layers of attention and swiglu; hidden 64; 4 heads"."""
        heads = f"; {counted(self.num_heads, 'head')}" if self.attends else ""
        return f"{self.pattern}; hidden {self.hidden_size}{heads}"

    @property
    def without_adapters(self) -> "ModelConfig":
        """Base model, without the low-rank adapters that modify it."""
        return replace(self, lora_rank=0, lora_alpha=0.0)

    @property
    def without_experts(self) -> "ModelConfig":
        """Model with one MLP in place of each mixture, of the kind and the width of an expert."""
        kinds = {str(FeedForward.EXPERTS): str(self.experts.mlp)}
        layers = tuple(" ".join(kinds.get(kind, kind) for kind in layer.split()) for layer in self.layers)
        return replace(self, layers=layers, mlp_size=self.experts.size or self.mlp_size, experts=EXPERTS)

    def with_head(self, head: str, *, num_classes: int = 0) -> "ModelConfig":
        """Return the model with another head on the same layers. The settings of the old head's logits are reset to
        their defaults.
        """
        logits: Settings = {"sentence_order": False, "tied": True, "logit_softcap": 0.0, "logit_divisor": 1.0}
        return replace(self, **{"head": head, "num_classes": num_classes, **logits})

    def resized(self, hidden_size: int) -> "ModelConfig":
        """Return a copy of the model with another hidden size. The width of the MLP changes in proportion. The head
        size changes too, if all heads together are as wide as the hidden size.
        """
        fits = self.query_size == self.hidden_size
        multiple = self.num_heads or 1
        mlp_size = self.mlp_size * hidden_size // self.hidden_size // multiple * multiple
        return replace(
            self,
            **self.resized_sections(hidden_size),
            hidden_size=hidden_size,
            head_size=0 if fits else self.head_size,
            mlp_size=0 if self.mlp_size == 4 * self.hidden_size else max(mlp_size, multiple),
        )

    def resized_sections(self, hidden_size: int) -> Settings:
        """Return the settings of `sections` for another hidden size."""
        return {name: section.resized(self.hidden_size, hidden_size) for name, section in self.sections.items()}


@cache
def mixer_sections() -> Mapping[str, type[MixerSection]]:
    """Return the class of each section of a kind of mixer, by the kind's name."""
    defaults = {field.name: field.default for field in fields(ModelConfig)}
    return {name: type(default) for name, default in defaults.items() if isinstance(default, MixerSection)}
