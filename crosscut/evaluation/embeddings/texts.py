"""Texts to embed: read lines, and encode them to token ids as the model's files say."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from crosscut.config import ConfigError, DataError
from crosscut.config.checks import require_at_least
from crosscut.config.layouts.limits import require_tensor_axis
from crosscut.config.published.sentences import MODULES_FILE, SentenceSteps, read_steps
from crosscut.config.system import files
from crosscut.data.text.lines import lines_of
from crosscut.data.tokenization.long_texts import batches
from crosscut.data.tokenization.published import PublishedTokenizer
from crosscut.evaluation.embeddings.pooling import SentencePooling, require_weights_of
from crosscut.evaluation.ranks import Machinery
from crosscut.pretrained import ModelSource


def read_lines(file: Path | None) -> list[str]:
    """Read the lines of a UTF-8 file, or of standard input if `file` is None. Raises `DataError` if the text cannot be
    read, or has no lines.
    """
    try:
        lines = lines_of(sys.stdin.buffer.read().decode()) if file is None else list(files.read_lines(file))
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        name = "Standard input" if file is None else f"`{file}`"
        raise DataError(f"{name} must be readable text, but is not: {reason}. Give UTF-8 text.") from None
    if lines and not lines[-1]:
        lines.pop()
    if not lines:
        name = "Standard input" if file is None else f"`{file}`"
        raise DataError(f"{name} must hold one text per line, but is empty. Add a text.")
    return lines


@dataclass(frozen=True, kw_only=True)
class TextOptions:
    """Choices of the user for the texts to embed."""

    max_tokens: int = 0
    """Number of tokens after which a text is cut; 0 means the length in the model's files or, without one, the model's
    maximum sequence length."""
    prompt_name: str | None = None
    """Name of the model's prompt that precedes every text; None means the model's default."""


@dataclass(frozen=True, kw_only=True)
class TextEncoder:
    """Tokenizer, prompt and length with which a model's texts are encoded, and the steps of its embeddings."""

    steps: SentenceSteps
    tokenizer: PublishedTokenizer
    max_tokens: int
    """Maximum number of tokens of a text, with its prompt."""
    prompt: str
    """Text that precedes every text."""
    num_skipped: int
    """Number of tokens at the start of a text that are left out of the pooling."""

    @classmethod
    def of(cls, source: ModelSource, options: TextOptions | None = None) -> "TextEncoder":
        """Read the encoder of an encoder model's texts. The length in the model's files is `max_seq_length` in
        `sentence_bert_config.json`, else `model_max_length` in `tokenizer_config.json`, but at most the model's maximum
        sequence length.

        Raises `ConfigError` if `max_tokens` exceeds the model's maximum sequence length, for a step or a value that is
        not supported, and for an unknown name, and `DataError` for a tokenizer that cannot be read.
        """
        options = options or TextOptions()
        most = source.model.max_sequence_length
        require_at_least("max_tokens", options.max_tokens, 0, maximum=most)
        is_published = source.is_published
        steps = read_steps(source.tokenizer.parent) if is_published else SentenceSteps()
        tokenizer = PublishedTokenizer(path=source.tokenizer, is_published=is_published, lower_case=steps.lower_case)
        named = steps.max_tokens or tokenizer.max_tokens or most
        length = options.max_tokens or min(named, most)
        prompt = steps.prompt(options.prompt_name)
        skipped = tokenizer.num_prompt_tokens(prompt, length) if steps.skips_prompt else 0
        if skipped >= length:
            raise ConfigError(
                f"`max_tokens` must be more than {skipped}, the number of tokens of the prompt {prompt!r}, but is "
                f"{length}. Choose another prompt or a larger maximum."
            )
        return cls(steps=steps, tokenizer=tokenizer, max_tokens=length, prompt=prompt, num_skipped=skipped)

    def pooling(self) -> SentencePooling:
        """Return the function from hidden states to embeddings. Reads the weights of dense layers."""
        return SentencePooling(self.steps, num_skipped=self.num_skipped)


def require_embeddings(source: ModelSource, tensor: int, options: TextOptions | None = None) -> TextEncoder:
    """Return the encoder of the texts of an encoder model (see `TextEncoder.of`). Raises its errors, and also
    `CheckpointError` or `LayoutError` if the model cannot embed texts on `tensor` ranks.
    """
    require_tensor_axis(source.model, tensor)
    encoder = TextEncoder.of(source, options)
    require_weights_of(encoder.steps, source.model.hidden_size)
    around = encoder.tokenizer.read().num_special_tokens_to_add(is_pair=False)
    if around > encoder.max_tokens:  # the tokenizers library would not cut at all
        raise ConfigError(
            f"`max_tokens` must be at least {around}, the number of tokens that the tokenizer puts around a text, but "
            f"is {encoder.max_tokens}. Choose a larger maximum."
        )
    return encoder


def encode_texts(
    place: str,
    read: Callable[[], Sequence[str]],
    on: Machinery,
    options: TextOptions,
    tell: Callable[[str], None],
) -> tuple[ModelSource, tuple[TextEncoder, list[list[int]]]]:
    """Find the model at `place`, and encode the texts that `read` returns. Returns the model, the encoder of its texts,
    and the ids of each text, with the tokens that the tokenizer puts around a text. `tell` is called with messages, and
    the errors are the same as those of `embed`.
    """
    source = on.find(place)
    source.require_encoder(place)
    encoder = require_embeddings(source, on.layout.tensor, options)
    for line in about_steps(source, encoder.steps):
        tell(line)
    inner = encoder.tokenizer.read(encoder.max_tokens)
    texts = (encoder.prompt + text for text in read())
    ids, num_cut = [], 0
    for number, one in enumerate(chain.from_iterable(map(inner.encode_batch, batches(texts, "Text"))), 1):
        if len(one.ids) <= encoder.num_skipped:
            beyond = " after the prompt" if encoder.num_skipped else ""
            raise DataError(f"Text {number} must have at least one token{beyond}, but has none. Remove the text.")
        if max(one.ids) >= source.model.vocab_size:
            raise DataError(
                f"`{source.tokenizer}` must be the model's tokenizer, with ids below {source.model.vocab_size:,}, but "
                f"text {number} has the id {max(one.ids):,}. Restore the tokenizer."
            )
        ids.append(one.ids)
        num_cut += bool(one.overflowing)
    if num_cut:
        tell(f"{num_cut} of {len(ids)} texts are longer than the maximum and were cut.")
    return source, (encoder, ids)


def about_steps(source: ModelSource, steps: SentenceSteps) -> list[str]:
    """Lines for the user about what of the model's files is not used, and about embeddings that are not normalised."""
    lines = list(steps.notices)
    if source.was_sentence_encoder:
        lines.append(
            f"The embeddings are the normalised mean of the tokens. `{MODULES_FILE}` of the sentence encoder from "
            "which the run started is not used."
        )
    if source.left_out:
        lines.append(f"Not loaded, because embeddings do not need them: {', '.join(source.left_out)}.")
    if not steps.is_normalized:
        lines.append("The embeddings do not have the length 1, because the model's last step does not normalise them.")
    return lines
