"""Training of a byte-level BPE, the tokenizer of GPT-2."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from crosscut.data.tokenization.end_of_text import END_OF_TEXT

if TYPE_CHECKING:
    import tokenizers


def train_bpe(texts: Iterable[str], *, vocab_size: int) -> tokenizers.Tokenizer:
    """Train a byte-level BPE with GPT-2's pre-tokenization.

    The vocabulary has `vocab_size` entries, with `<|endoftext|>` as entry 0. The vocabulary has fewer entries if the
    text has too few pairs of tokens that occur at least twice.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    inner.train_from_iterator(texts, trainer)
    return inner
