"""Description of a family of published models: its keys for the fields of `ModelConfig`, and their values."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class LayerList:
    """Keys of a `config.json` that say which kind each layer has."""

    kinds: Mapping[str, str]
    """Mapping from a file's name of a kind to the entry of `model.layers`. The first kind is that of a layer of which
    a file says nothing."""
    key: str = ""
    """Key of a list with the kind of each layer."""
    letters_key: str = ""
    """Key of a text with one letter for each layer, which is the kind's key in `letters`. It is written on export."""
    letters: Mapping[str, str] = field(default_factory=dict)
    """Mapping from the letters to a file's names of the kinds."""
    indices_key: str = ""
    """Key of a list with the indices of the layers of the second kind. All other layers have the first kind."""

    period_key: str = ""
    """Key of a number of layers, of which one has the second kind. All other layers have the first kind."""
    offset_key: str = ""
    """Key of the index of the first layer of the second kind."""
    period: tuple[int, int] = (1, 0)
    """Period and offset in a file without these keys."""

    interval: int = 0
    """If a file does not list the kinds, number of layers of which the last one has the second kind. 0 if all layers of
    such a file have the first kind."""
    interval_key: str = ""
    """Key of the interval. It is not written on export."""
    needs_all: bool = False
    """Whether a model has a layer of each kind."""
    norm_places: Mapping[str, str] = field(default_factory=dict)
    """Mapping from the entries of `model.layers` to the places of their norms. Empty if these do not differ."""

    @property
    def keys(self) -> tuple[str, ...]:
        """Keys that the family has."""
        given = (self.key, self.letters_key, self.indices_key, self.period_key, self.offset_key, self.interval_key)
        return tuple(filter(None, given))


@dataclass(frozen=True, kw_only=True)
class ExpertLayers:
    """Keys of a `config.json` that say which layers have experts in place of an MLP, and keys for the experts that are
    not those of one field. Without keys for the layers, all of them have experts, or none.
    """

    dense_number: int | None = None
    """Number of experts (`experts.number`) in a file of a model without experts. None if no number says so."""
    first_key: str = ""
    """Key of the number of the first layers, which have no experts."""
    first: int = 0
    """Number of these layers in a file without the key."""
    dense_key: str = ""
    """Key of a list of the indices of layers without experts."""
    step_key: str = ""
    """Key of a number of layers of which only the last one has experts. It is not written on export."""
    period_key: str = ""
    """Key of a number of layers, of which one has experts."""
    offset_key: str = ""
    """Key of the index of the first layer with experts."""
    period: tuple[int, int] = (1, 0)
    """Period and offset in a file without these keys."""
    shared_key: str = ""
    """Key of the number of experts that all tokens pass through. Together they are the shared MLP."""
    shared: int = 1
    """Number of these experts in a file without the key."""
    method_key: str = ""
    """Key that says whether tokens choose among the experts of all groups (`ALL_GROUPS`)."""

    @property
    def keys(self) -> tuple[str, ...]:
        """Keys for the layers that the family has."""
        given = (self.first_key, self.dense_key, self.step_key, self.period_key, self.offset_key)
        return tuple(filter(None, given))


ALL_GROUPS, BEST_GROUPS = "greedy", "group_limited_greedy"
"""Values of `ExpertLayers.method_key`: tokens choose among all experts, or among those of the best groups."""


@dataclass(frozen=True)
class Family:
    """Family of published models. Hugging Face calls the family's name the `model_type`. The name of a field in a
    section of `ModelConfig` has the section's name before a point, as in `mamba2.num_heads`.
    """

    model_type: str
    architecture: str
    keys: Mapping[str, str]
    """Mapping from the name of a field in `ModelConfig` to the field's key in the family's `config.json`."""
    fixed: Mapping[str, object]
    """Fields of `ModelConfig` that have the same value in all models of the family."""
    defaults: Mapping[str, object]
    """Values of the family's fields if a file omits their keys: the defaults of the family's configuration in
    `transformers`. A field in none of the mappings has the default of `ModelConfig`."""
    required: Mapping[str, tuple[object, ...]]
    """Other keys that change the computation, with the values that Crosscut supports. The first value applies if a file
    omits the key, and is written on export unless it is null."""
    stated: tuple[str, ...] = ()
    """Keys of `required` that a file must have, because Crosscut does not support their defaults."""
    layers: LayerList | None = None
    """Keys that say which kind each layer has. None if `fixed` has the layers of all models."""
    expansion: str = ""
    """Key for the width of all heads or channels of a state-space mixer, as a multiple of the hidden size. Empty if the
    family has no such key."""
    positions: str = ""
    """Key that says whether positions are rotary. Empty if `fixed` has the positions of all models."""
    biases: tuple[str, ...] = ()
    """Keys that say whether all matrices have biases. If a file omits these keys, the value in `fixed` applies."""
    dropouts: tuple[str, ...] = ()
    """Additional keys for dropout. Crosscut writes these keys on export and ignores them on import."""
    window: int | None = None
    """Length of the sliding attention window in tokens, if a file does not give it. None means full attention."""
    is_windowed: bool = False
    """Whether the sliding window is active even if a file does not set `use_sliding_window`."""
    heads: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    """Heads of the family's other architectures. Each key is the name of an architecture in the file, and its value
    holds the fields of `ModelConfig` that describe the head. A file with an unknown architecture is read without its
    head."""
    tied_tensors: tuple[tuple[str, str], ...] = ()
    """Ends of the names of tensors that are the same if `tie_word_embeddings` is true, in pairs."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Second names of keys. In `transformers`, the value under the second name has precedence."""
    rotates_before_norm: bool = False
    """Whether queries and keys are normalised after their rotation. The norm then removes YaRN's attention factor."""
    experts: ExpertLayers | None = None
    """Keys that say which layers have experts. None for a family without experts, and for one whose layers have them by
    `fixed` or `layers`."""
    nulls: tuple[str, ...] = ()
    """Keys that are null on export, because `transformers` has defaults for them that fit only the published models."""
    has_optional_base: bool = False
    """Whether positions are not rotary in a model whose rotary base (`rope_theta`) is null."""
    derived: Mapping[str, str] = field(default_factory=dict)
    """Keys that `transformers` computes from another key, with that key."""
    first_position: int = 0
    """Row of the first position in the table of learned positions. No text uses the rows before it."""

    @property
    def has_experts(self) -> bool:
        """Whether layers of some models of the family have experts."""
        return "experts.number" in self.keys

    @property
    def has_window(self) -> bool:
        """Whether some files of the family have a sliding window."""
        return self.is_windowed or self.window is not None

    @property
    def may_rotate(self) -> bool:
        """Whether positions are rotary in some models of the family."""
        return self.fixed.get("positions", "rotary") == "rotary"


SOFT_CAP_FIELD = "logit_softcap"
"""Field of `ModelConfig` for the soft cap. Families with a soft cap write null for a model without one."""
PLAIN = {
    "attention": "causal",
    "attention_gate": False,
    "rotary_fraction": 1.0,
    "norm_place": "before",
    "norm_places": (),
    "norm_offset": False,
    "token_types": 0,
    "head": "next_token",
    "sentence_order": False,
    "norm_affine": True,
    "embedding_norm": False,
    SOFT_CAP_FIELD: 0.0,
    "embedding_multiplier": 1.0,
    "residual_multiplier": 1.0,
    "attention_multiplier": 0.0,
    "logit_divisor": 1.0,
}
"""Settings that few families support, with their values in all other families."""
MULTIPLIERS = {
    "embedding_multiplier": "embedding_multiplier",
    "residual_multiplier": "residual_multiplier",
    "attention_multiplier": "attention_multiplier",
    "logit_divisor": "logits_scaling",
}
"""Keys of the multipliers of Granite."""
SOFTMAX_EXPERTS = {
    "experts.mlp": "swiglu",
    "experts.scores": "softmax",
    "experts.renormalise": True,
    "experts.scaling": 1.0,
    "experts.groups": 1,
    "experts.shared_size": 0,
    "experts.shared_gate": False,
    "experts.balance_bias": False,
}
"""Settings of experts with a gate, whose scores are a softmax that is renormalised for the experts of a token, as in
Mixtral."""
SIGMOID_EXPERTS = {
    "experts.mlp": "swiglu",
    "experts.scores": "sigmoid",
    "experts.group_top": 2,
    "experts.shared_gate": False,
    "experts.balance_bias": True,
}
"""Settings of experts whose scores are sigmoids, and whose choice follows a bias, as in DeepSeek-V3."""
