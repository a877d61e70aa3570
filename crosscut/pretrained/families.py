"""Names and layouts of published weights: one table per model family, used for reading and for writing.

A published model has the same matrices as Crosscut's model, under other names (`names`) and in other layouts. Nine
things differ:

- Queries, keys and values are three tensors (in GPT-2: stacked in one tensor). In Crosscut, one parameter holds the
  queries, and a second parameter holds keys and values, which alternate head by head.
- One tensor stacks the input projections of a state-space mixer, and another one the channels of its convolution. In
  Crosscut, they are several parameters, one of which holds the vectors B and C, which alternate group by group.
- The rows of Qwen3-Next's input projections are ordered by key head: its query, its key, and the values and gates of
  its value heads.
- In most families, each expert has tensors of its own. In Crosscut, one parameter stacks the matrices of all experts.
- GPT-2 stores its matrices transposed, [in, out].
- The published vocabulary is not padded.
- RoBERTa's table of positions begins with rows that belong to no position.
- DeepSeek's rotated rows alternate between the first and the second elements of the pairs. In Crosscut, the first
  elements of all pairs come before the second elements.
- NanoChat rotates queries and keys in the opposite direction. Swapping the two halves of a head reverses the direction
  of its rotation. Crosscut therefore swaps the halves of each head in the rows of NanoChat's queries and keys when it
  reads them, and swaps the halves back when it writes them.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from crosscut.architecture import Parameter, describe
from crosscut.architecture.parameters import Role
from crosscut.checkpoint.format.tensor_file import Form
from crosscut.config import ModelConfig
from crosscut.config.parts.head import HeadKind
from crosscut.config.published.folders import family_of
from crosscut.pretrained.names import BERT_WITH_HEADS, OUTPUT, Source, TensorNames, names_of


@dataclass(frozen=True)
class Weight:
    """A Crosscut parameter and its sources. The rows of the parameter are taken from the sources in turn, `group` rows
    at a time.
    """

    name: str
    shape: tuple[int, ...]
    """Shape without the vocabulary's padding."""
    sources: tuple[Source, ...]
    """Tensors from which the rows are taken in turn. If the parameter stacks the matrices of experts, the tensors of
    the experts, or one tensor for all of them (`Source.of_all`)."""
    group: int
    """Number of consecutive rows that come from the same source. This is the size of a head or of a group's vector if
    there are several sources, or if halves are swapped; otherwise the number of all rows.
    """
    is_matrix: bool = False
    """Whether the parameter is a matrix of a layer, which adapters may change."""
    is_bias_of_choice: bool = False
    """Whether the parameter is the bias of the experts' scores. Files hold it in float32 or wider, whatever the type of
    the other tensors is, since its steps are smaller than those of bfloat16."""
    stacked: int = 0
    """Number of experts whose matrices the parameter stacks; 0 for another parameter."""

    @property
    def source_rows(self) -> int:
        """Number of rows that come from each source."""
        return self.shape[0] // len(self.sources)

    def dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return the type of the tensors in the files of a model of type `dtype`."""
        return torch.promote_types(dtype, torch.float32) if self.is_bias_of_choice else dtype

    def matrix(self, index: int) -> "Weight":
        """Return the matrix of an expert with its source, as a parameter of its own."""
        is_whole = self.sources[0].of_all
        source = replace(self.sources[0], matrix=index) if is_whole else self.sources[index]
        return replace(self, shape=self.shape[1:], sources=(source,), group=self.shape[1], stacked=0)

    def shape_of(self, source: Source) -> tuple[int, ...]:
        """Shape of the whole published tensor of a source."""
        if self.stacked:
            shape = self.matrix(0).shape_of(source)
            return (self.stacked, *shape) if source.of_all else shape
        channel = (1,) if source.has_channel and len(self.shape) > 1 else ()
        shape = (source.num_rows or self.source_rows, *channel, *self.shape[1:])
        return shape[::-1] if source.transposed else shape

    def rows(self, index: int) -> Tensor:
        """Indices of the parameter's rows that come from source number `index`, in the order of the source's rows."""
        theirs = torch.arange(self.source_rows)
        place = theirs % self.group
        if self.sources[index].swaps_halves:
            place = (place + self.group // 2) % self.group
        if paired := self.sources[index].paired:
            first = self.group - paired
            of_pair = place - first
            place = torch.where(of_pair < 0, place, first + of_pair % 2 * (paired // 2) + of_pair // 2)
        return (theirs // self.group * len(self.sources) + index) * self.group + place

    def places(self, index: int) -> Tensor:
        """Indices of the rows that source number `index` has in its published tensor, in their order."""
        source, theirs = self.sources[index], torch.arange(self.source_rows)
        if not source.period:
            return source.start + theirs
        width = self.source_rows * source.period // source.num_rows
        return source.start + theirs // width * source.period + theirs % width

    @property
    def is_in_order(self) -> bool:
        """Whether the parameter's rows are the rows of one source, in their order."""
        return len(self.sources) == 1 and not (self.sources[0].swaps_halves or self.sources[0].paired)


_CLASSES, _SPANS, _SCORE = Source("classifier"), Source("qa_outputs"), Source("score")
"""Sources of the classifiers of tasks. The name `score` belongs to the classifier of a decoder."""
_BESIDE = (OUTPUT.name, "cls.", _CLASSES.name, _SPANS.name, _SCORE.name)
"""Beginnings of the names of heads. These names have no prefix, because heads are not part of the bare model."""

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
def _names_of(config: ModelConfig) -> TensorNames:
    names = _family_names(config)
    if not config.solves_task:
        return names
    is_spans = config.head is HeadKind.SPANS
    classifier = _SPANS if is_spans else _SCORE if config.is_causal else _CLASSES
    root = {**names.root, "task.pooler": Source("pooler.dense"), "task.classifier": classifier}
    return replace(names, root=root, prefix="transformer." if is_spans and config.is_causal else names.prefix)


def _family_names(config: ModelConfig) -> TensorNames:
    model_type = family_of(config).model_type
    has_heads = model_type == "bert" and config.head is not HeadKind.NEXT_TOKEN
    return BERT_WITH_HEADS if has_heads else names_of(model_type, config)


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
        prefix, of_layer = names.prefix + names.layer.format(i), names.of_layer(config.layer(i))
        for parameter in layer.parameters():
            module, kind = (parameter.name, "") if parameter.name in of_layer else _split(parameter.name)
            weights.append(_weight(config, parameter.named(f"blocks.{i}."), of_layer[module], prefix, kind))
    return weights


def _prefix(names: TensorNames, name: str) -> str:
    """Return the prefix of a tensor outside the layers. The names of heads have no prefix."""
    return "" if name.startswith(_BESIDE) else names.prefix


def _split(name: str) -> tuple[str, str]:
    """Split a parameter's name into its module and `weight` or `bias`."""
    module, _, kind = name.rpartition(".")
    return module, kind


def _weight(config: ModelConfig, parameter: Parameter, sources: tuple[Source, ...], prefix: str, kind: str) -> Weight:
    """Return a parameter with the published tensors that hold it. Rows of several tensors alternate head by head."""
    end = f".{kind}" if kind else ""
    placed = tuple(replace(source.placed(config), name=f"{prefix}{source.name}{end}") for source in sources)
    if parameter.stacked and not sources[0].of_all:
        placed = tuple(replace(placed[0], name=placed[0].name.format(i)) for i in range(parameter.stacked))
    group = sources[0].group
    if len(sources) > 1:
        group = parameter.shape[0] // (parameter.heads * parameter.num_matrices)
    if sources[0].swaps_halves:
        group = config.head_size
    is_matrix = parameter.role in (Role.MATRIX, Role.BEFORE_RESIDUAL) and not (parameter.is_wide or parameter.stacked)
    return Weight(
        parameter.name,
        parameter.shape,
        placed,
        group or parameter.shape[0],
        is_matrix,
        is_bias_of_choice=parameter.role is Role.BALANCE,
        stacked=parameter.stacked,
    )


def published_shapes(config: ModelConfig, *, first_position: int = 0) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors of a model in Hugging Face's format, keyed by name, in the order of
    `weights_of`.
    """
    weights = weights_of(config, first_position=first_position)
    return {source.name: weight.shape_of(source) for weight in weights for source in weight.sources}


def published_forms(config: ModelConfig, dtype: torch.dtype) -> dict[str, Form]:
    """Return the shapes and types of the tensors of a model of type `dtype` in Hugging Face's format, keyed by name, in
    the order of `weights_of`.
    """
    return {
        source.name: Form(weight.shape_of(source), weight.dtype(dtype))
        for weight in weights_of(config)
        for source in weight.sources
    }


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
    full = {f"{prefix}{name}" if bare and not name.startswith(_BESIDE) else name: name for name in names}
    return {_first_name(config, name): own for name, own in full.items()} if known.second_names else full


def _first_name(config: ModelConfig, name: str) -> str:
    """Return the name that Crosscut uses for a tensor, whose full name in a file may be another one."""
    known = _names_of(config)
    prefix, suffix = (re.escape(part) for part in (known.prefix + known.layer).split("{}"))
    found = re.fullmatch(rf"({prefix}(\d{{1,9}}){suffix})(.+)(\.\w+)", name)
    if found is None or int(found[2]) >= config.num_layers:
        return name
    return f"{found[1]}{known.first_name(config.layer(int(found[2])), found[3])}{found[4]}"


def joined_tensors(config: ModelConfig) -> list[tuple[str, dict[str, int]]]:
    """List the tensors that files may hold in place of several (`TensorNames.joined`), each with the names and the
    numbers of rows of those.
    """
    whole, parts = _names_of(config).joined
    if not parts:
        return []
    shapes = published_shapes(config)
    starts = [name.removesuffix(parts[0]) for name in shapes if name.endswith(parts[0])]
    return [(f"{start}{whole}", {f"{start}{part}": shapes[f"{start}{part}"][0] for part in parts}) for start in starts]


def further_layers(config: ModelConfig, names: Iterable[str]) -> tuple[str, ...]:
    """Return the prefixes of the names of tensors in layers that predict further tokens, which Crosscut leaves out."""
    mark = _names_of(config).further
    return tuple(name.removesuffix(mark) for name in names if mark and name.endswith(f".{mark}"))


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
    return embedding.sources[0].name, f"{OUTPUT.name}.weight"


def is_harmless(config: ModelConfig, name: str) -> bool:
    """Whether a file may contain this tensor although the tensor is not a parameter of the model: a copy of tied
    weights, or a buffer that newer versions of `transformers` compute.
    """
    tied = config.tied and name == f"{OUTPUT.name}.weight"
    return tied or re.fullmatch(_names_of(config).buffers, name) is not None


def is_head(config: ModelConfig, name: str) -> bool:
    """Whether a tensor belongs to a head or a pooler of an encoder. `name` is the tensor's full name."""
    return re.fullmatch(_names_of(config).heads, name) is not None
