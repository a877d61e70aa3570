"""Count the parameters of a model and the part of them that one tensor rank holds.

Every parameter is either cut over the tensor ranks or whole on each of them. Cut are the token embedding and an output
projection of its own, the weights of a layer's matrices and the biases of the column-parallel ones; whole are the
positions, the norms and the biases of the row-parallel matrices, and keys and values where there are fewer heads of
them than ranks. For GPT-2, with `V` vocabulary, `P` positions, `H` hidden size and `L` layers:

    cut = V H + L (12 H^2 + 7 H)        whole = P H + L 6 H + 2 H

The tensors are listed one by one; every count here and every message about them elsewhere is a sum over the list.
"""

from functools import lru_cache
from math import prod
from typing import NamedTuple

from crosscut.config import ConfigError, Layout, ModelConfig, padded_vocab_size


class LocalTensor(NamedTuple):
    """A parameter tensor as a tensor rank holds it."""

    shape: tuple[int, ...]
    is_whole: bool
    """Whether every tensor rank holds the same."""
    is_inside: bool = False
    """Whether it is whole and used inside a parallel region, so that every rank has a part of its gradient."""

    @property
    def size(self) -> int:
        """Elements."""
        return prod(self.shape)

    def has_partial_gradient(self, layout: Layout) -> bool:
        """Whether the ranks' gradients are to be summed over the tensor axis."""
        return self.is_whole and layout.tensor > 1 and (self.is_inside or layout.sequence_parallel)


def layer_tensors(model: ModelConfig, layout: Layout) -> list[LocalTensor]:
    """The tensors of a layer."""
    return list(_layer_tensors(model, layout.tensor))


@lru_cache(maxsize=4096)
def _layer_tensors(model: ModelConfig, tensor: int) -> tuple[LocalTensor, ...]:
    H, T, mlp = model.hidden_size, tensor, model.mlp_size
    norms = 2 * _norm(model)
    head_norms = [LocalTensor((model.head_size,), True, is_inside=True)] * (2 if model.qk_norm else 0)
    on_qkv, elsewhere = model.biases != "none", model.biases == "all"
    if model.shares_key_value_heads(T):
        key_value = _with_bias(LocalTensor((model.key_value_size, H), True, is_inside=True), on_qkv)
    else:
        key_value = _columns(model.key_value_size, H, T, bias=on_qkv)
    query, output = _columns(model.query_size, H, T, bias=on_qkv), _rows(H, model.query_size, T, bias=elsewhere)
    expand = _columns(mlp, H, T, bias=elsewhere) * (2 if model.mlp == "swiglu" else 1)
    return (*norms, *query, *key_value, *head_norms, *output, *expand, *_rows(H, mlp, T, bias=elsewhere))


def root_tensors(model: ModelConfig, layout: Layout) -> list[LocalTensor]:
    """The tensors of no layer: embeddings, the final norm, and an output projection of its own."""
    H, padded = model.hidden_size, padded_vocab_size(known_vocab_size(model), layout.tensor)
    vocabulary = [LocalTensor((padded // layout.tensor, H), False)] * (1 if model.tied else 2)
    positions = [LocalTensor((model.max_sequence_length, H), True)] * (model.positions == "learned")
    return [*vocabulary, *positions, *_norm(model)]


def count_parameters(model: ModelConfig) -> int:
    """Parameters of the whole, uncut model, with the vocabulary as the tokenizer has it.

    Raises `ConfigError` where `model.vocab_size` is still 0.
    """
    layers = model.num_layers * _size(layer_tensors(model, Layout()))
    padding = padded_vocab_size(known_vocab_size(model), 1) - model.vocab_size
    num_vocabularies = 1 if model.tied else 2
    return layers + _size(root_tensors(model, Layout())) - num_vocabularies * padding * model.hidden_size


def parameters_per_rank(model: ModelConfig, layout: Layout) -> int:
    """Parameters that each tensor rank holds: its part of what is cut, padding included, and all of what is whole.

    The vocabulary is padded to a multiple of 128 x `layout.tensor` (paper, section 5.1). `layout.tensor` must cut the
    model evenly, which `RunConfig` checks. Raises `ConfigError` where `model.vocab_size` is still 0.
    """
    return _parameters_per_rank(model, layout.tensor)


@lru_cache(maxsize=4096)
def _parameters_per_rank(model: ModelConfig, tensor: int) -> int:
    layout = Layout(tensor=tensor)
    return _size(root_tensors(model, layout)) + model.num_layers * _size(layer_tensors(model, layout))


def replicated_parameters(model: ModelConfig, layout: Layout) -> int:
    """Parameters that every tensor rank holds whole."""
    return sum(tensor.size for tensor in all_tensors(model, layout) if tensor.is_whole)


def partial_gradients(model: ModelConfig, layout: Layout) -> int:
    """Elements of the gradients that are to be summed over the tensor ranks."""
    layer, root = layer_tensors(model, layout), root_tensors(model, layout)
    in_layer, in_root = (sum(t.size for t in part if t.has_partial_gradient(layout)) for part in (layer, root))
    return in_root + model.num_layers * in_layer


def num_tensors(model: ModelConfig) -> int:
    """Parameter tensors."""
    return len(all_tensors(model, Layout()))


def num_replicated_tensors(model: ModelConfig, layout: Layout) -> int:
    """Parameter tensors that every tensor rank holds whole."""
    return sum(tensor.is_whole for tensor in all_tensors(model, layout))


def all_tensors(model: ModelConfig, layout: Layout) -> list[LocalTensor]:
    """Every parameter tensor of the model."""
    return [*root_tensors(model, layout), *model.num_layers * layer_tensors(model, layout)]


def known_vocab_size(model: ModelConfig) -> int:
    """`model.vocab_size`; raises `ConfigError` where it is 0, which leaves it to a tokenizer."""
    if not model.vocab_size:
        raise ConfigError(
            "`model.vocab_size` must be at least 1 to forecast a model, but is 0, which leaves it to the tokenizer. "
            "Give the number of the tokenizer's entries."
        )
    return model.vocab_size


def _size(tensors: list[LocalTensor]) -> int:
    return sum(tensor.size for tensor in tensors)


def _norm(model: ModelConfig) -> list[LocalTensor]:
    """Scale and shift of a layer norm, or the scale of an RMS norm."""
    return [LocalTensor((model.hidden_size,), True)] * (2 if model.norm == "layer" else 1)


def _columns(outputs: int, inputs: int, tensor: int, *, bias: bool) -> list[LocalTensor]:
    """A column-parallel layer, cut with its bias."""
    return _with_bias(LocalTensor((outputs // tensor, inputs), False), bias)


def _rows(outputs: int, inputs: int, tensor: int, *, bias: bool) -> list[LocalTensor]:
    """A row-parallel layer, cut, its bias whole."""
    weight = LocalTensor((outputs, inputs // tensor), False)
    return [weight, LocalTensor((outputs,), True)] if bias else [weight]


def _with_bias(weight: LocalTensor, bias: bool) -> list[LocalTensor]:
    """A weight, and a bias that lies as its rows do."""
    return [weight, weight._replace(shape=weight.shape[:1])] if bias else [weight]
