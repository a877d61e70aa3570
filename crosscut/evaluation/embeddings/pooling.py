"""Embeddings from the last hidden states of texts, with the steps of a sentence encoder.

Legend: B texts, S tokens, H hidden size, P modes of pooling, D elements of an embedding. The hidden states h_1 to h_n
of a text become P vectors, which are joined:

    mean                  sum h_t / n
    mean_sqrt_len_tokens  sum h_t / sqrt(n)
    weightedmean          sum t h_t / sum t
    max                   the largest value of each element
    cls, lasttoken        h_1, h_n

If the tokens of the prompt are left out, the sums, the maximum and `cls` begin after the prompt, and t still counts
from the first token of the prompt. Dense layers and normalisations turn the joined vector into the embedding.
"""

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from crosscut.config import CheckpointError
from crosscut.config.published.sentences import Dense, SentenceSteps
from crosscut.config.published.weights import SINGLE_FILE
from crosscut.pretrained.finite import count_not_finite, not_finite
from crosscut.pretrained.tensors import DTYPES, StoredTensor, list_file, read_whole


class SentencePooling:
    """Function from the hidden states [B, S, H] of texts to their embeddings [B, D]."""

    def __init__(self, steps: SentenceSteps | None = None, *, num_skipped: int = 0) -> None:
        """`steps` are by default those of a model without a list of modules: the normalised mean. `num_skipped` is the
        number of tokens at the start of each text that are left out of the pooling. Reads the weights of the dense
        layers. Raises `CheckpointError` if these cannot be read or are not finite.
        """
        self.steps = SentenceSteps() if steps is None else steps
        self.num_skipped = num_skipped
        self._weights = {step: _read(step) for step in self.steps.after if isinstance(step, Dense)}

    def __call__(self, hidden: Tensor, lengths: Tensor) -> Tensor:
        """Embed texts with `lengths` [B] tokens. Each text must have more than `num_skipped` tokens. The result is in
        float32 or wider.
        """
        hidden = hidden.to(torch.promote_types(hidden.dtype, torch.float32))
        pooled = [_POOLINGS[mode](hidden, lengths, self.num_skipped) for mode in self.steps.poolings]
        found = torch.cat(pooled, dim=1)
        for step in self.steps.after:
            found = self._dense(step, found) if isinstance(step, Dense) else F.normalize(found, dim=1)
        return found[:, : self.steps.num_dimensions]

    def _dense(self, step: Dense, x: Tensor) -> Tensor:
        weights = {name: weight.to(x) for name, weight in self._weights[step].items()}
        made: Tensor = getattr(torch.nn, step.activation)()(F.linear(x, weights["weight"], weights.get("bias")))
        if step.has_residual:
            made = made + (F.linear(x, weights["residual"]) if "residual" in weights else x)
        return made


def require_weights_of(steps: SentenceSteps, hidden_size: int) -> None:
    """Raise `CheckpointError` if the weights of a dense layer are missing or do not fit the layer before."""
    size = len(steps.poolings) * hidden_size
    for step in steps.after:
        if isinstance(step, Dense):
            if step.num_inputs != size:
                raise CheckpointError(
                    f"`in_features` in `{step.folder / 'config.json'}` must be {size}, the size of the vector before "
                    f"this layer, but is {step.num_inputs}. Download the model again."
                )
            _stored(step)
            size = step.num_outputs


def _stored(step: Dense) -> dict[str, StoredTensor]:
    """Return the tensors of a dense layer, keyed by our names. Raises `CheckpointError` if they are not exactly those
    of the layer.
    """
    path = step.folder / SINGLE_FILE
    if not path.is_file():
        raise CheckpointError(
            f"`{path}` must exist, but is missing. Save the model again with sentence-transformers "
            "(`save_pretrained`), which writes this file."
        )
    shape = (step.num_outputs, step.num_inputs)
    wanted = {"linear.weight": shape, **({"linear.bias": shape[:1]} if step.has_bias else {})}
    if step.has_residual and step.num_inputs != step.num_outputs:
        wanted["residual.weight"] = shape
    found = list_file(path)
    shapes = {name: tensor.shape for name, tensor in found.items()}
    if shapes != wanted or not all(tensor.dtype in DTYPES for tensor in found.values()):
        told, must = (", ".join(f"{name} {list(one[name])}" for name in sorted(one)) for one in (shapes, wanted))
        raise CheckpointError(f"`{path}` must hold {must}, but holds {told}. Download the model again.")
    names = {"linear.weight": "weight", "linear.bias": "bias", "residual.weight": "residual"}
    return {names[name]: tensor for name, tensor in found.items()}


def _read(step: Dense) -> dict[str, Tensor]:
    weights = {name: read_whole(tensor) for name, tensor in _stored(step).items()}
    for name, weight in weights.items():
        if count := count_not_finite(weight):
            raise not_finite(step.folder, name, count, "Download the model again.")
    return weights


def _kept(hidden: Tensor, lengths: Tensor, skipped: int) -> tuple[Tensor, Tensor]:
    """Return the positions [1, S, 1] of the tokens, counted from 1, and whether each token is pooled [B, S, 1]."""
    positions = torch.arange(1, hidden.shape[1] + 1, device=hidden.device)[None, :, None]
    return positions, (positions > skipped) & (positions <= lengths[:, None, None])


def _sum(hidden: Tensor, lengths: Tensor, skipped: int) -> tuple[Tensor, Tensor]:
    _, kept = _kept(hidden, lengths, skipped)
    return hidden.where(kept, 0.0).sum(1), kept.sum(1)


def _mean(hidden: Tensor, lengths: Tensor, skipped: int) -> Tensor:
    total, number = _sum(hidden, lengths, skipped)
    return total / number


def _mean_sqrt(hidden: Tensor, lengths: Tensor, skipped: int) -> Tensor:
    total, number = _sum(hidden, lengths, skipped)
    return total / number.to(total.dtype).sqrt()


def _weighted_mean(hidden: Tensor, lengths: Tensor, skipped: int) -> Tensor:
    positions, kept = _kept(hidden, lengths, skipped)
    weights = positions.where(kept, 0).to(hidden.dtype)
    return (hidden.where(kept, 0.0) * weights).sum(1) / weights.sum(1)


def _max(hidden: Tensor, lengths: Tensor, skipped: int) -> Tensor:
    _, kept = _kept(hidden, lengths, skipped)
    return hidden.masked_fill(~kept, float("-inf")).amax(1)


def _first(hidden: Tensor, lengths: Tensor, skipped: int) -> Tensor:  # noqa: ARG001 - all modes are called alike
    return hidden[:, skipped]


def _last(hidden: Tensor, lengths: Tensor, skipped: int) -> Tensor:  # noqa: ARG001 - all modes are called alike
    return hidden[torch.arange(len(hidden), device=hidden.device), lengths - 1]


_POOLINGS: Mapping[str, Callable[[Tensor, Tensor, int], Tensor]] = {
    "mean": _mean,
    "mean_sqrt_len_tokens": _mean_sqrt,
    "weightedmean": _weighted_mean,
    "max": _max,
    "cls": _first,
    "lasttoken": _last,
}
