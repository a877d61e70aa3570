"""Published tensors from which parameters are taken, and their names in a family."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum

from crosscut.config import ModelConfig
from crosscut.config.parts.gated_delta import GatedDeltaConfig


class Stack(Enum):
    """Matrices that one published tensor stacks."""

    QUERY_KEY_VALUE = "queries, keys and values"
    QUERY_GATE = "query and gate of each attention head"
    GATE_UP = "gate and up of a gated MLP"
    SHARED_GATE_UP = "gate and up of the MLP beside the experts"
    EXPERT_GATE_UP = "gate and up of an expert"
    MIXER = "gate, inputs, vectors B, vectors C and step sizes of a state-space mixer"
    INNER_GATE = "inputs and gate of a state-space mixer of the first kind"
    CHANNELS = "channels of the inputs, of B and of C in a state-space mixer's convolution"
    KEY_HEADS = "query, key, values and gates of each key head of a gated delta net"
    CONTROLS = "strengths and step sizes of the value heads of each key head of a gated delta net"
    DELTA_CHANNELS = "channels of the queries, keys and values in a gated delta net's convolution"


def _rows_of(stack: Stack, config: ModelConfig) -> list[int]:
    """Return the number of rows of each matrix of a stack, or, if it repeats for each head, its rows in one head."""
    if stack is Stack.QUERY_GATE:
        return [config.head_size] * 2
    if stack is Stack.QUERY_KEY_VALUE:
        return [heads * config.head_size for heads in (config.num_heads, config.num_kv_heads, config.num_kv_heads)]
    widths = {
        Stack.GATE_UP: config.mlp_size,
        Stack.SHARED_GATE_UP: config.experts.shared_size,
        Stack.EXPERT_GATE_UP: config.experts.size,
    }
    if stack in widths:
        return [widths[stack]] * 2
    if stack is Stack.INNER_GATE:
        return [config.mamba.inner_size] * 2
    if stack in _OF_DELTA:
        return _rows_of_delta(stack, config.gated_delta)
    sizes = config.mamba2
    channels = [sizes.inner_size, *[sizes.num_groups * sizes.state_size] * 2]
    return channels if stack is Stack.CHANNELS else [sizes.inner_size, *channels, sizes.num_heads]


_OF_DELTA = (Stack.KEY_HEADS, Stack.CONTROLS, Stack.DELTA_CHANNELS)


def _rows_of_delta(stack: Stack, sizes: GatedDeltaConfig) -> list[int]:
    key, shared = sizes.key_head_size, sizes.num_value_heads // max(sizes.num_key_heads, 1)
    if stack is Stack.CONTROLS:
        return [shared] * 2
    if stack is Stack.KEY_HEADS:
        return [key] * 2 + [shared * sizes.value_head_size] * 2
    return [sizes.num_key_heads * key] * 2 + [sizes.num_value_heads * sizes.value_head_size]


@dataclass(frozen=True)
class Source:
    """A published tensor, or a range of its rows, from which rows of a Crosscut parameter are taken."""

    name: str
    stacked: int | None = None
    """Index of the matrix in a tensor that stacks several (`stack`). None if the tensor is not stacked."""
    transposed: bool = False
    """Whether rows of the Crosscut parameter are columns of the published tensor."""
    start: int = 0
    """Index of the tensor's first row that belongs to this source."""
    num_rows: int = 0
    """Number of rows in the whole tensor. 0 if all rows belong to this source."""
    stack: Stack = Stack.QUERY_KEY_VALUE
    """Matrices of the tensor, if it is stacked."""
    period: int = 0
    """Number of rows after which the rows of all matrices of the tensor repeat. 0 if each matrix has adjacent rows."""
    has_channel: bool = False
    """Whether the published weight has a dimension of size 1 after its rows, for the one input channel of a
    convolution."""
    swaps_halves: bool = False
    """Whether the Crosscut parameter holds the two halves of each group of rows in the opposite order."""
    group: int = 0
    """Number of rows of a group with `paired` rows, such as a head."""
    paired: int = 0
    """Number of rows at the end of each group that alternate between first and second elements of pairs in the
    published tensor. In the Crosscut parameter, all first elements come before all second elements."""
    of_all: bool = False
    """Whether the published tensor holds the matrices of all experts. Otherwise each expert has a tensor of its own,
    and `{}` in the name stands for the expert's index."""
    matrix: int | None = None
    """Index of a matrix in a tensor that holds those of all experts; None for the whole tensor."""

    def placed(self, config: ModelConfig) -> "Source":
        """Return the source with the range of its rows in a stacked tensor. A source that is not stacked is returned
        unchanged.
        """
        if self.stacked is None:
            return self
        rows = _rows_of(self.stack, config)
        key_heads, total = config.gated_delta.num_key_heads, sum(rows)
        heads = {Stack.QUERY_GATE: config.num_heads, Stack.KEY_HEADS: key_heads, Stack.CONTROLS: key_heads}
        repeats = heads.get(self.stack, 0)
        placed = replace(self, start=sum(rows[: self.stacked]), num_rows=total * (repeats or 1))
        return replace(placed, period=total) if repeats else placed


@dataclass(frozen=True)
class TensorNames:
    """Names of a family's published tensors. A module's name stands for its weight and its bias."""

    prefix: str
    """Prefix of all names except the names of heads. Files of a model without its output projection omit the prefix."""
    layer: str
    """Prefix of the names in a layer."""
    root: Mapping[str, Source]
    """Sources of modules outside the layers, keyed by Crosscut's name of the module."""
    block: Mapping[str, tuple[Source, ...]]
    """Sources of modules in a layer, and of parameters whose names end with no `weight` or `bias`, keyed by Crosscut's
    name."""
    buffers: str
    """Pattern for names of buffers that older versions of `transformers` stored with the parameters. Newer versions
    compute the buffers.
    """
    optional_prefix: str = ""
    """Pattern for the prefix of the names in files that also hold a head. Files of the bare model omit the prefix."""
    kinds: Mapping[str, Mapping[str, tuple[Source, ...]]] = field(default_factory=dict)
    """Sources in layers with a part of a kind, by the kind's name, which replace and add to those of `block`."""
    second_names: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Other names of modules in files, with those of `block` and `kinds`, by a kind of part of their layers."""
    joined: tuple[str, tuple[str, ...]] = ("", ())
    """Name of a tensor of a layer that some files hold in place of several, which it joins by rows, with their names.
    Other files hold its rows in as many tensors, but not as many in each."""
    further: str = ""
    """End of the name of a tensor that only layers have that follow the model's layers and predict further tokens.
    Crosscut leaves out these layers. Empty for a family without such layers."""
    heads: str = ""
    """Pattern for names of heads and poolers. Crosscut loads only the heads and poolers that the model has."""

    def first_name(self, layer: str, module: str) -> str:
        """Return the name of a module in a layer with the parts `layer`, for any of its names in files."""
        found = (self.second_names[kind].get(module) for kind in layer.split() if kind in self.second_names)
        return next(filter(None, found), module)

    def of_layer(self, layer: str) -> dict[str, tuple[Source, ...]]:
        """Sources in a layer with the parts `layer` (an entry of `model.layers`)."""
        found = dict(self.block)
        for kind in layer.split():
            found.update(self.kinds.get(kind, {}))
        return found


OUTPUT = Source("lm_head")
"""Output projection of a decoder."""
