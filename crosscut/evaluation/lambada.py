"""LAMBADA cloze accuracy (paper, section 4.2.2).

The model reads a passage without its last word and must predict this word. The prediction is correct if each token of
the word is the likeliest token, given the passage and the true earlier tokens of the word (teacher forcing).
"""

from collections.abc import Sequence
from pathlib import Path

from crosscut.config import ConfigError, DataError
from crosscut.config.system.files import parse_json
from crosscut.data.text.lines import lines_of
from crosscut.evaluation.scoring import Ids, WindowScores
from crosscut.evaluation.task import Encoder, Figures, Setting, as_ids, exponential, hashed, read_text
from crosscut.evaluation.windows import Window


class Lambada:
    """Task LAMBADA: predict the last word of each passage. The passages are in their raw form.

    The task reports the accuracy as the paper defines it, over all tokens of the last word. The task also reports the
    accuracy of the last token alone, which other evaluations use, and the perplexity of the last word. Every passage
    starts with the token ids in `before`. For the paper's models, `before` is empty. If `limit` is above 0, only the
    first `limit` passages of the file are scored. Raises `DataError` for a file that cannot be read or a passage of a
    single word, and `ConfigError` for a window that is too short for the last word of a passage.
    """

    name = "lambada"

    def __init__(
        self, file: str, tokenizer: Encoder, *, before: Sequence[int] = (), window: int, limit: int = 0
    ) -> None:
        path = Path(file)
        self._num_before = len(before)
        self.texts: list[Ids] = []
        self.windows: list[Window] = []
        for number, passage in enumerate(_passages(path)[: limit or None], 1):
            ids, first = last_word(passage, tokenizer)
            if not first:
                raise DataError(
                    f"`evaluation.lambada` must hold passages of several words, but passage {number} of `{file}` "
                    f"is {passage[:60]!r}. Use LAMBADA's file in its raw form."
                )
            if len(ids) - first > window:
                raise ConfigError(
                    f"`evaluation.window` must be long enough for the last word of each passage in `{file}`, but is "
                    f"{window}, and one last word has {len(ids) - first} tokens. Set a larger `evaluation.window`."
                )
            ids, first = [*before, *ids], len(before) + first
            self.windows.append(Window(len(self.texts), max(0, len(ids) - 1 - window), len(ids), first))
            self.texts.append(as_ids(ids))
        self.protocol: dict[str, Setting] = {
            "window": window,
            "counted": "all tokens of the last word, teacher forcing",
            "first_id": before[0] if before else None,
            "limit": limit or None,
        }
        self.data = [hashed(file, path)]

    def figures(self, scores: WindowScores) -> Figures:
        """Return the accuracy as the paper defines it, and the figures that other evaluations report."""
        num_targets = [window.num_targets for window in self.windows]
        num = len(self.windows)
        return Figures(
            figures={
                "accuracy": int((scores.hits == num_targets).sum()) / num,
                "last_token_accuracy": int(scores.last_hits.sum()) / num,
                "perplexity": exponential(float(scores.losses.sum()) / num),
            },
            counts={
                "passages": num,
                "tokens": sum(map(len, self.texts)) - num * self._num_before,
                "passages_of_one_last_token": num_targets.count(1),
                "passages_cut": sum(window.start > 0 for window in self.windows),
            },
        )


def last_word(passage: str, tokenizer: Encoder) -> tuple[list[int], int]:
    """Return the ids of a passage, and the index of the first id of its last word. The index is 0 if the passage has
    only one word.
    """
    context, blank, _ = passage.rpartition(" ")
    ids = tokenizer.encode(passage)
    if not blank:
        return ids, 0
    before = tokenizer.encode(context.rstrip())
    shared = next((i for i, (a, b) in enumerate(zip(ids, before, strict=False)) if a != b), len(before))
    return ids, min(shared, len(ids) - 1)


def _passages(path: Path) -> list[str]:
    """Return the passages of a file: one per line, or the value of `text` on each line of a .jsonl file."""
    lines = [line for line in lines_of(read_text(path, "evaluation.lambada")) if line.strip()]
    if path.suffix == ".jsonl":
        lines = [_text(path, line) for line in lines]
    if not lines:
        raise DataError(f"`evaluation.lambada` must hold passages, but `{path}` is empty. Check the path.")
    return [line.strip() for line in lines]


def _text(path: Path, line: str) -> str:
    """Return the value of `text` on a line of a .jsonl file."""
    try:
        text = parse_json(line)["text"]
        if isinstance(text, str):
            return text
    except (ValueError, KeyError, TypeError):
        pass
    raise DataError(
        "`evaluation.lambada` must hold a JSON object with a string under the key `text` on every line, but "
        f"`{path}` does not. Use LAMBADA's file in its raw form."
    )
