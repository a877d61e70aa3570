"""Names and layouts of published weights: one table per model family, used for reading and for writing.

A published model has the same matrices as Crosscut's model, under other names and in other layouts. Five things differ:

- Queries, keys and values are three tensors (in GPT-2: stacked in one tensor). In Crosscut, one parameter holds the
  queries, and a second parameter holds keys and values, which alternate head by head.
- GPT-2 stores its matrices transposed, [in, out].
- The published vocabulary is not padded.
- RoBERTa's table of positions begins with rows that belong to no position.
- NanoChat rotates queries and keys in the opposite direction. Swapping the two halves of a head reverses the direction
  of its rotation. Crosscut therefore swaps the halves of each head in the rows of NanoChat's queries and keys when it
  reads them, and swaps the halves back when it writes them.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from crosscut.architecture import Parameter, describe
from crosscut.config import ModelConfig
from crosscut.config.model import HeadKind


@dataclass(frozen=True)
class Source:
    """A published tensor, or a range of its rows, from which rows of a Crosscut parameter are taken."""

    name: str
    stacked: int | None = None
    """Index in a tensor that stacks queries (0), keys (1) and values (2). None if the tensor is not stacked."""
    transposed: bool = False
    """Whether rows of the Crosscut parameter are columns of the published tensor."""
    start: int = 0
    """Index of the tensor's first row that belongs to this source."""
    num_rows: int = 0
    """Number of rows in the whole tensor. 0 if all rows belong to this source."""
    swaps_halves: bool = False
    """Whether the Crosscut parameter holds the two halves of each group of rows in the opposite order."""


@dataclass(frozen=True)
class Weight:
    """A Crosscut parameter and its sources. The rows of the parameter are taken from the sources in turn, `group` rows
    at a time.
    """

    name: str
    shape: tuple[int, ...]
    """Shape without the vocabulary's padding."""
    sources: tuple[Source, ...]
    group: int
    """Number of consecutive rows that come from the same source. This is the head size if there are several sources or
    if halves are swapped, otherwise the number of all rows.
    """

    @property
    def source_rows(self) -> int:
        """Number of rows that come from each source."""
        return self.shape[0] // len(self.sources)

    def shape_of(self, source: Source) -> tuple[int, ...]:
        """Shape of the whole published tensor of a source."""
        shape = (source.num_rows or self.source_rows, *self.shape[1:])
        return shape[::-1] if source.transposed else shape

    def rows(self, index: int) -> Tensor:
        """Indices of the parameter's rows that come from source number `index`, in the order of the source's rows."""
        theirs = torch.arange(self.source_rows)
        place = theirs % self.group
        if self.sources[index].swaps_halves:
            place = (place + self.group // 2) % self.group
        return (theirs // self.group * len(self.sources) + index) * self.group + place

    @property
    def is_in_order(self) -> bool:
        """Whether the parameter's rows are the rows of one source, in their order."""
        return len(self.sources) == 1 and not self.sources[0].swaps_halves


@dataclass(frozen=True)
class _TensorNames:
    """Names of a family's published tensors. A module's name stands for its weight and its bias."""

    prefix: str
    """Prefix of all names except the names of heads. Files of a model without its output projection omit the prefix."""
    layer: str
    """Prefix of the names in a layer."""
    root: Mapping[str, Source]
    """Sources of modules outside the layers, keyed by Crosscut's name of the module."""
    block: Mapping[str, tuple[Source, ...]]
    """Sources of modules in a layer, keyed by Crosscut's name of the module."""
    buffers: str
    """Pattern for names of buffers that older versions of `transformers` stored with the parameters. Newer versions
    compute the buffers.
    """
    optional_prefix: str = ""
    """Pattern for the prefix of the names in files that also hold a head. Files of the bare model omit the prefix."""
    heads: str = ""
    """Pattern for names of heads and poolers. Crosscut loads only the heads and poolers that the model has."""


_OUTPUT = Source("lm_head")
_CLASSES, _SPANS, _SCORE = Source("classifier"), Source("qa_outputs"), Source("score")
"""Sources of the classifiers of tasks. The name `score` belongs to the classifier of a decoder."""
_BESIDE = (_OUTPUT.name, "cls.", _CLASSES.name, _SPANS.name, _SCORE.name)
"""Beginnings of the names of heads. These names have no prefix, because heads are not part of the bare model."""

_GPT2 = _TensorNames(
    prefix="transformer.",
    layer="h.{}.",
    root={"tokens": Source("wte"), "positions": Source("wpe"), "final_norm": Source("ln_f"), "output": _OUTPUT},
    block={
        "attention_norm": (Source("ln_1"),),
        "attention.qkv.query": (Source("attn.c_attn", 0, transposed=True),),
        "attention.qkv.key_value": tuple(Source("attn.c_attn", part, transposed=True) for part in (1, 2)),
        "attention.output": (Source("attn.c_proj", transposed=True),),
        "mlp_norm": (Source("ln_2"),),
        "mlp.expand": (Source("mlp.c_fc", transposed=True),),
        "mlp.contract": (Source("mlp.c_proj", transposed=True),),
    },
    buffers=r"transformer\.h\.\d+\.attn\.(bias|masked_bias)",
)
_BIGCODE = replace(
    _GPT2,
    block={module: tuple(replace(one, transposed=False) for one in sources) for module, sources in _GPT2.block.items()},
)
_LLAMA = _TensorNames(
    prefix="model.",
    layer="layers.{}.",
    root={"tokens": Source("embed_tokens"), "final_norm": Source("norm"), "output": _OUTPUT},
    block={
        "attention_norm": (Source("input_layernorm"),),
        "attention.qkv.query": (Source("self_attn.q_proj"),),
        "attention.qkv.key_value": (Source("self_attn.k_proj"), Source("self_attn.v_proj")),
        "attention.query_norm": (Source("self_attn.q_norm"),),
        "attention.key_norm": (Source("self_attn.k_norm"),),
        "attention.output": (Source("self_attn.o_proj"),),
        "mlp_norm": (Source("post_attention_layernorm"),),
        "mlp.expand.gate": (Source("mlp.gate_proj"),),
        "mlp.expand.up": (Source("mlp.up_proj"),),
        "mlp.contract": (Source("mlp.down_proj"),),
    },
    buffers=r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq",
)
_OLMO2 = replace(
    _LLAMA,
    block={
        **_LLAMA.block,
        "attention_norm": (Source("post_attention_layernorm"),),
        "mlp_norm": (Source("post_feedforward_layernorm"),),
    },
)
_STARCODER2 = replace(
    _LLAMA,
    block={
        **{module: sources for module, sources in _LLAMA.block.items() if not module.startswith("mlp.")},
        "mlp.expand": (Source("mlp.c_fc"),),
        "mlp.contract": (Source("mlp.c_proj"),),
    },
)


_ARCEE = replace(
    _LLAMA,
    block={
        **_STARCODER2.block,
        "mlp.expand": (Source("mlp.up_proj"),),
        "mlp.contract": (Source("mlp.down_proj"),),
    },
)


_NANOCHAT = replace(
    _ARCEE,
    block={
        **_ARCEE.block,
        "attention.qkv.query": (Source("self_attn.q_proj", swaps_halves=True),),
        "attention.qkv.key_value": (Source("self_attn.k_proj", swaps_halves=True), Source("self_attn.v_proj")),
        "mlp.expand": (Source("mlp.fc1"),),
        "mlp.contract": (Source("mlp.fc2"),),
    },
)


_BERT = _TensorNames(
    prefix="",
    layer="encoder.layer.{}.",
    root={
        "tokens": Source("embeddings.word_embeddings"),
        "positions": Source("embeddings.position_embeddings"),
        "token_types": Source("embeddings.token_type_embeddings"),
        "embedding_norm": Source("embeddings.LayerNorm"),
    },
    block={
        "attention.qkv.query": (Source("attention.self.query"),),
        "attention.qkv.key_value": (Source("attention.self.key"), Source("attention.self.value")),
        "attention.output": (Source("attention.output.dense"),),
        "attention_norm": (Source("attention.output.LayerNorm"),),
        "mlp.expand": (Source("intermediate.dense"),),
        "mlp.contract": (Source("output.dense"),),
        "mlp_norm": (Source("output.LayerNorm"),),
    },
    buffers=r"(bert\.)?embeddings\.(position_ids|token_type_ids)|cls\.predictions\.decoder\.(weight|bias)",
    optional_prefix=r"^(bert|roberta)\.",
    heads=r"(bert\.)?(pooler|cls|lm_head|classifier|qa_outputs)\..+",
)
_BERT_WITH_HEADS = replace(
    _BERT,
    prefix="bert.",
    root={
        **_BERT.root,
        "prediction": Source("cls.predictions"),
        "prediction.dense": Source("cls.predictions.transform.dense"),
        "prediction.norm": Source("cls.predictions.transform.LayerNorm"),
        "order.pooler": Source("pooler.dense"),
        "order.classifier": Source("cls.seq_relationship"),
    },
)
_OLD_KINDS = {".LayerNorm.gamma": ".LayerNorm.weight", ".LayerNorm.beta": ".LayerNorm.bias"}
"""Endings of the names of norms in BERT's oldest files, with the endings in today's files."""

_OF_ROBERTA = {"classifier.dense.": "pooler.dense.", "classifier.out_proj.": f"{_CLASSES.name}."}
"""Beginnings of names in RoBERTa's head for classes, with BERT's names for the same layers."""
_MASKED_OF_ROBERTA = {
    "lm_head.dense.": "cls.predictions.transform.dense.",
    "lm_head.layer_norm.": "cls.predictions.transform.LayerNorm.",
    "lm_head.decoder.": "cls.predictions.decoder.",
    "lm_head.bias": "cls.predictions.bias",
}
"""Beginnings of names in RoBERTa's head for masked tokens, with BERT's names for the same layers."""


@lru_cache(maxsize=64)
def _names_of(config: ModelConfig) -> _TensorNames:
    names = _family_names(config)
    if not config.solves_task:
        return names
    is_spans = config.head is HeadKind.SPANS
    classifier = _SPANS if is_spans else _SCORE if config.is_causal else _CLASSES
    root = {**names.root, "task.pooler": Source("pooler.dense"), "task.classifier": classifier}
    return replace(names, root=root, prefix="transformer." if is_spans and config.is_causal else names.prefix)


def _family_names(config: ModelConfig) -> _TensorNames:
    if config.norm_place == "after":
        return _BERT if config.head is HeadKind.NEXT_TOKEN else _BERT_WITH_HEADS
    if config.norm_place == "output":
        return _OLMO2
    if config.embedding_norm:
        return _NANOCHAT
    if config.positions == "rotary":
        return {"attention swiglu": _LLAMA, "attention relu2": _ARCEE}.get(config.layers[0], _STARCODER2)
    return _GPT2 if config.num_kv_heads == config.num_heads else _BIGCODE


def weights_of(config: ModelConfig, *, first_position: int = 0) -> list[Weight]:
    """List the parameters of a model, each with the published tensors from which its rows are taken. The parameters
    outside the layers come first, then the parameters of each layer. Adapters are not listed. `first_position` is the
    index of the row that holds position 0 in the published table of positions.
    """
    names, decoder = _names_of(config), describe(config.without_adapters)
    weights = []
    for parameter in decoder.root_parameters():
        module, kind = _split(parameter.name)
        source = names.root[module]
        if module == "positions" and first_position:
            source = replace(source, start=first_position, num_rows=first_position + config.max_sequence_length)
        weights.append(_weight(config, parameter, (source,), _prefix(names, source.name), kind))
    for i, layer in enumerate(decoder.layers):
        prefix = names.prefix + names.layer.format(i)
        for parameter in layer.parameters():
            module, kind = _split(parameter.name)
            weights.append(_weight(config, parameter.named(f"blocks.{i}."), names.block[module], prefix, kind))
    return weights


def _prefix(names: _TensorNames, name: str) -> str:
    """Return the prefix of a tensor outside the layers. The names of heads have no prefix."""
    return "" if name.startswith(_BESIDE) else names.prefix


def _split(name: str) -> tuple[str, str]:
    """Split a parameter's name into its module and `weight` or `bias`."""
    module, _, kind = name.rpartition(".")
    return module, kind


def _weight(config: ModelConfig, parameter: Parameter, sources: tuple[Source, ...], prefix: str, kind: str) -> Weight:
    """Return a parameter with the published tensors that hold it. Rows of several tensors alternate head by head."""
    placed = tuple(replace(_placed(config, source), name=f"{prefix}{source.name}.{kind}") for source in sources)
    is_by_heads = len(sources) > 1 or sources[0].swaps_halves
    group = config.head_size if is_by_heads else parameter.shape[0]
    return Weight(parameter.name, parameter.shape, placed, group)


def published_shapes(config: ModelConfig, *, first_position: int = 0) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors of a model in Hugging Face's format, keyed by name, in the order of
    `weights_of`.
    """
    weights = weights_of(config, first_position=first_position)
    return {source.name: weight.shape_of(source) for weight in weights for source in weight.sources}


def with_prefix(config: ModelConfig, names: list[str]) -> dict[str, str]:
    """Map the full names of a published model's tensors to the names in its files. The files omit the family's prefix
    if the model was stored without its output projection. The full names of a BERT without heads have no prefix.
    """
    known = _names_of(config)
    prefix = known.prefix
    if known.optional_prefix:
        bare_names = {_renamed(config, re.sub(known.optional_prefix, "", name)): name for name in names}
        return {f"{_prefix(known, bare)}{bare}": name for bare, name in bare_names.items()}
    bare = not any(name.startswith(prefix) for name in names)
    return {f"{prefix}{name}" if bare and not name.startswith(_BESIDE) else name: name for name in names}


def _renamed(config: ModelConfig, name: str) -> str:
    """Return the name that a current BERT file uses for a tensor. Old files and RoBERTa's heads use other names for the
    same layers.
    """
    old = next((end for end in _OLD_KINDS if name.endswith(end)), "")
    name = name.removesuffix(old) + _OLD_KINDS.get(old, "")
    theirs = _MASKED_OF_ROBERTA if config.predicts_masked else _OF_ROBERTA
    other = next((start for start in theirs if name.startswith(start)), "")
    return theirs.get(other, "") + name.removeprefix(other)


def count_layers(config: ModelConfig, names: Iterable[str]) -> int:
    """Return the number of layers of a published model: 1 + the largest layer index in `names`, the full names of its
    tensors. Returns 0 if no name has a layer index.
    """
    names_of = _names_of(config)
    prefix, suffix = (re.escape(part) for part in (names_of.prefix + names_of.layer).split("{}"))
    found = (re.match(rf"{prefix}(\d{{1,9}}){suffix}", name) for name in names)
    return 1 + max((int(match[1]) for match in found if match), default=-1)


def tied_names(config: ModelConfig) -> tuple[str, str]:
    """Names of the embedding and of the output projection if they are the same tensor. Empty names otherwise."""
    if not (config.tied and config.is_causal):
        return "", ""
    embedding = next(weight for weight in weights_of(config) if weight.name == "tokens.weight")
    return embedding.sources[0].name, f"{_OUTPUT.name}.weight"


def is_harmless(config: ModelConfig, name: str) -> bool:
    """Whether a file may contain this tensor although the tensor is not a parameter of the model: a copy of tied
    weights, or a buffer that newer versions of `transformers` compute.
    """
    tied = config.tied and name == f"{_OUTPUT.name}.weight"
    return tied or re.fullmatch(_names_of(config).buffers, name) is not None


def is_head(config: ModelConfig, name: str) -> bool:
    """Whether a tensor belongs to a head or a pooler of an encoder. `name` is the tensor's full name."""
    return re.fullmatch(_names_of(config).heads, name) is not None


def _placed(config: ModelConfig, source: Source) -> Source:
    """Return the source with the range of its rows in the stacked tensor of queries, keys and values. A source that is
    not stacked is returned unchanged.
    """
    if source.stacked is None:
        return source
    rows = [heads * config.head_size for heads in (config.num_heads, config.num_kv_heads, config.num_kv_heads)]
    return replace(source, start=sum(rows[: source.stacked]), num_rows=sum(rows))
