"""Whose rows our parameters are: one table a family, read in both directions.

A published model names the same matrices otherwise and cuts them otherwise. Three things differ: queries, keys and
values are three tensors (GPT-2: one on top of the other in one), where ours are the queries and, head by head, keys and
values; GPT-2 keeps its matrices the other way round, [in, out]; and the vocabulary is not padded.

H hidden size, A heads, K heads of keys and values, D head size, F width of the MLP, V vocabulary, P positions.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from crosscut.architecture import Parameter, describe
from crosscut.config import ModelConfig


@dataclass(frozen=True)
class Source:
    """A published tensor, or some of its rows, as we have rows."""

    name: str
    stacked: int | None = None
    """Which of queries (0), keys (1) and values (2) it is, where one tensor holds all three in this order."""
    transposed: bool = False
    """Whether our rows are its columns."""
    start: int = 0
    """The first of its rows that is ours."""
    num_rows: int = 0
    """All rows that it has; 0 where all are ours."""


@dataclass(frozen=True)
class Weight:
    """One of our parameters: the rows of its sources, `group` of them of each in turn."""

    name: str
    shape: tuple[int, ...]
    """Shape without the vocabulary's padding."""
    sources: tuple[Source, ...]
    group: int
    """Rows of one source that follow each other; all of them where there is one source."""

    @property
    def source_rows(self) -> int:
        """Rows that each source has."""
        return self.shape[0] // len(self.sources)

    def shape_of(self, source: Source) -> tuple[int, ...]:
        """Shape of the whole published tensor."""
        shape = (source.num_rows or self.source_rows, *self.shape[1:])
        return shape[::-1] if source.transposed else shape

    def rows(self, index: int) -> Tensor:
        """Indices of our parameter's rows that come from source number `index`, in the source's order: ascending."""
        theirs = torch.arange(self.source_rows)
        return (theirs // self.group * len(self.sources) + index) * self.group + theirs % self.group


@dataclass(frozen=True)
class _Names:
    """Names of a family's published tensors; a module's name stands for its weight and its bias."""

    prefix: str
    """Prefix of all names but the output's; the files of a model without its output leave the prefix out."""
    layer: str
    """Prefix of the names in a layer."""
    root: Mapping[str, Source]
    """Sources by our name of a module outside of the layers."""
    block: Mapping[str, tuple[Source, ...]]
    """Sources by our name of a module in a layer."""
    buffers: str
    """Pattern for the names of buffers that older versions stored beside the parameters, and that are computed now."""


_OUTPUT = Source("lm_head")

_GPT2 = _Names(
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
_LLAMA = _Names(
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


def _names_of(config: ModelConfig) -> _Names:
    if config.positions == "rotary":
        return {"swiglu": _LLAMA, "relu2": _ARCEE}.get(config.mlp, _STARCODER2)
    return _GPT2 if config.num_kv_heads == config.num_heads else _BIGCODE


def weights_of(config: ModelConfig) -> list[Weight]:
    """All parameters of a model and their places in a published one: those outside of the layers, then the layers."""
    names, decoder = _names_of(config), describe(config)
    weights = []
    for parameter in decoder.root_parameters():
        module, kind = _split(parameter.name)
        source = names.root[module]
        weights.append(_weight(config, parameter, (source,), "" if source is _OUTPUT else names.prefix, kind))
    for i, layer in enumerate(decoder.layers):
        prefix = names.prefix + names.layer.format(i)
        for parameter in layer.parameters():
            module, kind = _split(parameter.name)
            weights.append(_weight(config, parameter.named(f"blocks.{i}."), names.block[module], prefix, kind))
    return weights


def _split(name: str) -> tuple[str, str]:
    """A parameter's module and its name in the module: `weight` or `bias`."""
    module, _, kind = name.rpartition(".")
    return module, kind


def _weight(config: ModelConfig, parameter: Parameter, sources: tuple[Source, ...], prefix: str, kind: str) -> Weight:
    """A parameter and the published tensors that hold it. Rows of several tensors alternate head by head."""
    placed = tuple(replace(_placed(config, source), name=f"{prefix}{source.name}.{kind}") for source in sources)
    group = config.head_size if len(sources) > 1 else parameter.shape[0]
    return Weight(parameter.name, parameter.shape, placed, group)


def published_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The tensors of the published model, by name, in the order of `weights_of`."""
    return {source.name: weight.shape_of(source) for weight in weights_of(config) for source in weight.sources}


def with_prefix(config: ModelConfig, names: list[str]) -> dict[str, str]:
    """Names of a file by those that a whole model's has: a model without its output is stored without the prefix."""
    prefix = _names_of(config).prefix
    bare = not any(name.startswith(prefix) for name in names)
    return {f"{prefix}{name}" if bare and not name.startswith(_OUTPUT.name) else name: name for name in names}


def is_harmless(config: ModelConfig, name: str) -> bool:
    """Whether a tensor that is no parameter of the model may be in its files."""
    tied = config.tied and name == f"{_OUTPUT.name}.weight"
    return tied or re.fullmatch(_names_of(config).buffers, name) is not None


def _placed(config: ModelConfig, source: Source) -> Source:
    """With the rows that it has in a tensor of queries, keys and values."""
    if source.stacked is None:
        return source
    rows = [heads * config.head_size for heads in (config.num_heads, config.num_kv_heads, config.num_kv_heads)]
    return replace(source, start=sum(rows[: source.stacked]), num_rows=sum(rows))
