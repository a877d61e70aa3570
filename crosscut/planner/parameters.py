"""How many parameters a model has, and how many of them one tensor rank holds.

Every parameter is either cut over the tensor ranks or whole on each of them. Cut are the token embedding (tied with
the output projection), the weights of the four matrices of a layer and the biases of the two column-parallel ones;
whole are the positions, the layer norms and the biases of the two row-parallel matrices:

    cut = V H + L (12 H^2 + 7 H)        whole = P H + L 6 H + 2 H

`V` vocabulary, `P` positions, `H` hidden size, `L` layers.
"""

from typing import NamedTuple

from crosscut.config import ConfigError, Layout, ModelConfig, padded_vocab_size


def count_parameters(model: ModelConfig) -> int:
    """Parameters of the whole, uncut model, with the vocabulary as the tokenizer has it.

    Raises `ConfigError` where `model.vocab_size` is still 0.
    """
    return _cut(model, known_vocab_size(model)) + replicated_parameters(model)


def parameters_per_rank(model: ModelConfig, layout: Layout) -> int:
    """Parameters that each tensor rank holds: its part of what is cut, padding included, and all of what is whole.

    The vocabulary is padded to a multiple of 128 x `layout.tensor` (paper, section 5.1). `layout.tensor` must divide
    the hidden size, which `RunConfig` checks. Raises `ConfigError` where `model.vocab_size` is still 0.
    """
    padded = padded_vocab_size(known_vocab_size(model), layout.tensor)
    return _cut(model, padded) // layout.tensor + replicated_parameters(model)


def replicated_parameters(model: ModelConfig) -> int:
    """Parameters that every tensor rank holds whole: positions, layer norms and row-parallel biases."""
    H = model.hidden_size
    layer_norms, row_biases = 2 * 2 * H, 2 * H
    return model.max_sequence_length * H + model.num_layers * (layer_norms + row_biases) + 2 * H


class LocalTensor(NamedTuple):
    """A parameter tensor as a tensor rank holds it."""

    shape: tuple[int, ...]
    is_whole: bool
    """Whether every tensor rank holds the same."""


def layer_tensors(model: ModelConfig, layout: Layout) -> list[LocalTensor]:
    """The twelve tensors of a layer."""
    H, mlp, T = model.hidden_size, model.mlp_size, layout.tensor
    cut = [(3 * H // T, H), (3 * H // T,), (H, H // T), (mlp // T, H), (mlp // T,), (H, mlp // T)]
    norms, row_biases = [(H,)] * 4, [(H,)] * 2
    return [*(LocalTensor(s, False) for s in cut), *(LocalTensor(s, True) for s in norms + row_biases)]


def root_tensors(model: ModelConfig, layout: Layout) -> list[LocalTensor]:
    """The tensors of no layer: the embeddings of tokens and positions, and the final layer norm's two."""
    H, padded = model.hidden_size, padded_vocab_size(known_vocab_size(model), layout.tensor)
    whole = [(model.max_sequence_length, H), (H,), (H,)]
    return [LocalTensor((padded // layout.tensor, H), False), *(LocalTensor(shape, True) for shape in whole)]


def num_tensors(model: ModelConfig) -> int:
    """Parameter tensors: twelve a layer (weights and biases of two layer norms and four matrices), the embeddings of
    tokens and positions, and the final layer norm's two.
    """
    return 12 * model.num_layers + 4


def num_replicated_tensors(model: ModelConfig) -> int:
    """Those of them that every tensor rank holds whole: in a layer two layer norms and two row-parallel biases, beside
    them the positions and the final layer norm.
    """
    return 6 * model.num_layers + 3


def known_vocab_size(model: ModelConfig) -> int:
    """`model.vocab_size`; raises `ConfigError` where it is 0, which leaves it to a tokenizer."""
    if not model.vocab_size:
        raise ConfigError(
            "`model.vocab_size` must be at least 1 to forecast a model, but is 0, which leaves it to the tokenizer. "
            "Give the number of the tokenizer's entries."
        )
    return model.vocab_size


def _cut(model: ModelConfig, vocab_size: int) -> int:
    H, mlp = model.hidden_size, model.mlp_size
    query_key_value = 3 * H * H + 3 * H
    attention_output = H * H
    mlp_matrices = H * mlp + mlp + mlp * H
    return vocab_size * H + model.num_layers * (query_key_value + attention_output + mlp_matrices)
