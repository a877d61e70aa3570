"""Predict masked words: the likeliest tokens for each mask token in a text. The model must have a head for masked
tokens.

The tokens of several masks are predicted independently: for each prediction, the model sees the other masks, but not
their predictions. The probabilities are the softmax of the model's logits over the whole vocabulary (BERT, arXiv
1810.04805, section 3.1).

Shapes: B texts, S sequence, H hidden, N masks of a batch, V vocabulary.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from crosscut.config import ConfigError, DataError
from crosscut.config.system.terminal import echo
from crosscut.data.tokenization.inner import SPLIT_SPECIAL_TOKENS, splits_special_tokens
from crosscut.data.tokenization.long_texts import require_short
from crosscut.data.tokenization.published import PublishedTokenizer
from crosscut.data.tokenization.special_tokens import special_tokens
from crosscut.generation.sampling import not_finite
from crosscut.model import GPT, Batch
from crosscut.parallel import reshard
from crosscut.pretrained import ModelSource

USUAL_WORDS = 5
"""Default number of predictions per mask, the same as in the fill-mask pipeline of `transformers`."""

_TEXTS_AT_ONCE = 16
"""Maximum number of texts per forward pass."""


@dataclass(frozen=True)
class Word:
    """One prediction of a masked token."""

    token: int
    text: str
    """Text of the token. A token that continues a word may begin with a mark of the tokenizer, such as `##`."""
    probability: float


@dataclass(frozen=True)
class Filled:
    """A prompt with the predictions of its masks."""

    prompt: str
    text: str
    """Text of the prompt with the likeliest token in place of each mask, and without special tokens."""
    masks: tuple[tuple[Word, ...], ...]
    """Predictions for each mask, in the order of the text. The likeliest token comes first."""

    def to_json(self) -> dict[str, Any]:
        """Fields of the JSON line that `--json` prints."""
        return {
            "prompt": self.prompt,
            "text": self.text,
            "tokens": [words[0].token for words in self.masks],
            "masks": [[vars(word) for word in words] for words in self.masks],
        }


class Filler:
    """Predictor of masked tokens, with the tokenizer of `source`. It returns the `num_words` likeliest tokens for each
    mask. Raises `DataError` if the tokenizer lacks a special token that masked language modelling needs.
    """

    def __init__(self, source: ModelSource, *, num_words: int = USUAL_WORDS) -> None:
        self._config, self._num_words = source.model, min(num_words, source.model.vocab_size)
        if splits_special_tokens(source.tokenizer):
            raise ConfigError(
                f"`{SPLIT_SPECIAL_TOKENS}` beside `{source.tokenizer}` must be false to fill in masked words, but is "
                "true. The mask in a prompt is then plain text. Correct the file."
            )
        published = PublishedTokenizer(path=source.tokenizer, is_published=source.is_published)
        self._tokenizer: Tokenizer = published.read()
        self._path = source.tokenizer
        self.mask = special_tokens(self._tokenizer, name=f"`{source.tokenizer}`").mask
        """Id of the mask token."""

    def encode(self, prompt: str) -> list[int]:
        """Return the token ids of a prompt, including the special tokens that the tokenizer puts around a text. Raises
        `ConfigError` if the prompt has no mask or exceeds the model's maximum sequence length, and `DataError` for an
        id that is not in the model's vocabulary.
        """
        require_short(prompt, "The prompt")
        ids: list[int] = self._tokenizer.encode(prompt).ids
        start, most = f"{prompt[:40]}..." if len(prompt) > 40 else prompt, self._config.max_sequence_length
        if self.mask not in ids:
            mask = self._tokenizer.id_to_token(self.mask)
            raise ConfigError(
                f"The prompt {start!r} must have the mask token `{mask}` in place of each word to predict, but has "
                f"none. The model fills in masked words. Write `{mask}` in the prompt."
            )
        if len(ids) > most:
            raise ConfigError(
                f"The prompt {start!r} must fit into the model's sequence length ({most} tokens), but has "
                f"{len(ids)}. Shorten the prompt."
            )
        if max(ids) >= self._config.vocab_size:
            raise DataError(
                f"`{self._path}` must be the model's tokenizer, with ids below {self._config.vocab_size:,}, but the "
                f"prompt {start!r} has the id {max(ids):,}. Restore the tokenizer."
            )
        return ids

    @torch.no_grad()
    def fill(self, model: GPT, prompts: Sequence[str]) -> list[Filled]:
        """Predict the masked tokens of all prompts. Every rank must call this method, and all ranks get the same
        predictions.

        Raises the errors of `encode`, and `GenerationError` if logits are not finite.
        """
        encoded = [self.encode(prompt) for prompt in prompts]
        found: list[Filled] = []
        for start in range(0, len(prompts), _TEXTS_AT_ONCE):
            texts = encoded[start : start + _TEXTS_AT_ONCE]
            logits = iter(self._logits(model, texts))
            for prompt, ids in zip(prompts[start:], texts, strict=False):
                found.append(self._filled(prompt, ids, [next(logits) for one in ids if one == self.mask]))
        reshard(model)
        return found

    def _logits(self, model: GPT, texts: Sequence[Sequence[int]]) -> Tensor:
        """Return the logits [N, V] of all masks, in the order of the texts."""
        device = model.mesh.device
        tokens = pad_sequence([torch.tensor(ids, device=device) for ids in texts], batch_first=True)
        lengths = torch.tensor([len(ids) for ids in texts], device=device)
        mask = torch.arange(tokens.shape[1], device=device) < lengths[:, None]
        hidden = model.hidden_states(Batch(tokens=tokens, mask=mask))
        logits = model.logits_of(hidden[(tokens == self.mask) & mask])
        return logits.to(torch.promote_types(logits.dtype, torch.float32))

    def _filled(self, prompt: str, ids: Sequence[int], logits: Sequence[Tensor]) -> Filled:
        if not all(one.isfinite().all() for one in logits):
            raise not_finite(torch.stack([*logits]), "a mask")
        best = [one.softmax(0).topk(self._num_words) for one in logits]
        masks = tuple(tuple(map(self._word, top.indices.tolist(), top.values.tolist())) for top in best)
        words = iter(masks)
        likeliest = [next(words)[0].token if one == self.mask else one for one in ids]
        return Filled(prompt, self._tokenizer.decode(likeliest), masks)

    def _word(self, token: int, probability: float) -> Word:
        return Word(token, self._tokenizer.decode([token], skip_special_tokens=False), probability)


def print_filled(filled: Sequence[Filled], *, as_json: bool) -> None:
    """Print the predictions for each prompt, either as one line of JSON or as the prompt followed by one line per
    word.
    """
    for one in filled:
        if as_json:
            echo(json.dumps(one.to_json(), ensure_ascii=False))
            continue
        echo(one.prompt, bold=True)
        for number, words in enumerate(one.masks, 1):
            if len(one.masks) > 1:
                echo(f"mask {number}")
            for word in words:
                echo(f"{word.probability:8.2%}  {word.text.strip()}")
