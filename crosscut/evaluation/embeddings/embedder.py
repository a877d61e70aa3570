"""Embed texts that arrive one after another, from many clients. Texts of several clients share a forward pass.

Texts are taken in the order of fair queueing (Demers, Keshav and Shenker 1989). Text i of a request gets a time: the
value of a clock at the request's arrival, plus i. The text with the lowest time is taken next, and the clock advances
to this time. Requests that wait together therefore get the same number of texts per pass, and a request for one text
does not wait behind a request for thousands of texts. The next `_PASSES` x `num_rows` texts are sorted by their length
before they are divided into passes, so that little padding is computed.

All ranks make the same calls in the same order.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from torch import Tensor

from crosscut.config import ConfigError, GenerationError
from crosscut.evaluation.embeddings.pooling import SentencePooling
from crosscut.evaluation.embeddings.vectors import embeddings
from crosscut.model import GPT

_PASSES = 2
"""Number of passes whose texts are sorted together by length. A text that arrives while these passes run waits for
them.
"""


@dataclass(frozen=True, eq=False)
class Embedded:
    """Result for one text: the text's embedding, or the error that prevented the embedding."""

    number: int
    """The text's number, as returned by `Embedder.add`."""
    embedding: Tensor | None = None
    """Embedding [D] on the CPU."""
    error: Exception | None = None

    @property
    def finish(self) -> str:
        """Reason why the work on the text ended: "stop" if the text has an embedding, otherwise "error"."""
        return "stop" if self.error is None else "error"


class Embedder:
    """Embedder of many texts with one encoder (see the module's docstring). A forward pass has at most `num_rows`
    texts. `pooling` is by default the normalised mean.
    """

    def __init__(self, model: GPT, *, num_rows: int, pooling: SentencePooling | None = None) -> None:
        self._model = model.eval()
        self._pooling = SentencePooling() if pooling is None else pooling
        self._num_rows = num_rows
        self._waiting: dict[int, tuple[int, ...]] = {}
        """Token ids of the texts that have no embedding yet, by number."""
        self._queue: list[tuple[int, int]] = []
        """Heap of (time, number) of the texts that belong to no pass yet, including texts that were cancelled."""
        self._passes: list[list[int]] = []
        """Numbers of the texts in each of the next passes. The last pass comes first in the list."""
        self._time = 0
        self._num_added = 0
        self._is_alone = all(axis.size == 1 for axis in model.mesh.axes)
        """Whether this rank computes a pass alone. If so, it can abandon a pass after any error."""

    @property
    def is_idle(self) -> bool:
        """Whether no text is waiting."""
        return not self._waiting

    def add(self, ids: Sequence[int], *, index: int = 0) -> int:
        """Queue a text, given by its token ids, and return the text's number. `index` is the text's index in its
        request.

        Raises `ConfigError` for a text without tokens, an id outside the vocabulary, and a text that is longer than the
        model's maximum sequence length.
        """
        config, fewest = self._model.config, self._pooling.num_skipped + 1
        if not fewest <= len(ids) <= config.max_sequence_length:
            raise ConfigError(
                f"A text must have from {fewest} to {config.max_sequence_length} tokens (the model's maximum sequence "
                f"length), but has {len(ids)}. Split the text."
            )
        if not 0 <= min(ids) <= max(ids) < config.vocab_size:
            raise ConfigError(
                f"A text's token ids must be from 0 to {config.vocab_size - 1}, the model's last vocabulary entry, but "
                f"are from {min(ids)} to {max(ids)}. Use this model's tokenizer."
            )
        number = self._num_added
        self._num_added += 1
        self._waiting[number] = tuple(ids)
        heappush(self._queue, (self._time + index, number))
        return number

    def cancel(self, number: int) -> None:
        """Drop the text with this number. Nothing happens if the text already has an embedding."""
        self._waiting.pop(number, None)

    def step(self) -> list[Embedded]:
        """Embed the texts of the next pass. Call this method only if a text is waiting, and then on every rank.

        If an embedding is not finite, only its text gets an error. If a pass fails, only the texts of this pass get the
        error. On several ranks, the error of a pass is raised instead: the other ranks may have no error, and would
        wait for this rank.
        """
        texts = {number: self._waiting.pop(number) for number in self._next_pass()}
        try:
            found = dict(zip(texts, self._embed([*texts.values()]), strict=True))
            # NaN weights of a position can reach shorter texts through their padding. A text alone has no padding.
            for number in [number for number, vector in found.items() if not vector.isfinite().all()]:
                found[number] = self._embed([texts[number]])[0]
        except Exception as error:
            if not self._is_alone:
                raise
            return [Embedded(number, error=error) for number in texts]
        return [_report(number, vector) for number, vector in found.items()]

    def _embed(self, texts: list[tuple[int, ...]]) -> Tensor:
        return embeddings(self._model, texts, pooling=self._pooling, batch_size=len(texts))

    def _next_pass(self) -> list[int]:
        """Return the numbers of the texts in the next pass, at least one."""
        while True:
            if not self._passes:
                self._passes = self._next_passes()
            if numbers := [number for number in self._passes.pop() if number in self._waiting]:  # others are cancelled
                return numbers

    def _next_passes(self) -> list[list[int]]:
        numbers: list[int] = []
        while self._queue and len(numbers) < _PASSES * self._num_rows:
            time, number = heappop(self._queue)
            if number in self._waiting:
                self._time = max(self._time, time)
                numbers.append(number)
        numbers.sort(key=lambda number: (len(self._waiting[number]), number), reverse=True)
        return [numbers[start : start + self._num_rows] for start in range(0, len(numbers), self._num_rows)]


def _report(number: int, vector: Tensor) -> Embedded:
    if vector.isfinite().all():
        return Embedded(number, vector)
    kind = "NaN" if vector.isnan().any() else "infinite"
    return Embedded(
        number,
        error=GenerationError(
            f"The model's embeddings must be finite, but one has {kind} elements. The weights are damaged, or the "
            "precision cannot hold the numbers. Try --precision float32; check a checkpoint with `crosscut "
            "checkpoint verify`."
        ),
    )
