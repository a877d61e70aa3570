"""WikiText-103 perplexity (paper, section 4.2.1).

The file holds words that are separated by spaces, but the model reads ordinary text, split into the model's own tokens.
The losses of all T tokens are summed and divided by T_o, the number of words in the original file:

    perplexity = exp(-1 / T_o  sum_t log P(t | previous tokens in the window))

Dividing by T_o makes models with different vocabularies comparable, including models that predict words.
"""

from pathlib import Path

from crosscut.config import DataError
from crosscut.evaluation.detokenizers import detokenize
from crosscut.evaluation.perplexity import bits_per_byte
from crosscut.evaluation.scoring import Ids, WindowScores
from crosscut.evaluation.task import Encoder, Figures, Setting, as_ids, exponential, hashed, read_text
from crosscut.evaluation.windows import Window, sliding_windows


class WikiText103:
    """Perplexity of a WikiText-103 file, in its tokenised or raw form.

    The id `start` is put in front of the text, so that all T tokens of the text are scored. Raises `DataError` for a
    file that cannot be read or that is not a WikiText file.
    """

    name = "wikitext103"

    def __init__(
        self, file: str, tokenizer: Encoder, *, start: int, window: int, overlap: int, detokenizer: str
    ) -> None:
        path = Path(file)
        words = read_text(path, "evaluation.wikitext103")
        if " @-@ " not in words:
            raise DataError(
                f"`evaluation.wikitext103` must be a file of WikiText-103, but `{file}` does not contain ` @-@ `, "
                "WikiText's hyphen. Use `wiki.test.tokens` or `wiki.test.raw`, or score another text with "
                "`evaluation.text`."
            )
        self.num_words = len(words.strip().split(" "))
        text = detokenize(words, detokenizer)
        self.num_bytes = len(text.encode())
        ids = tokenizer.encode(text)
        self.texts: list[Ids] = [as_ids([start, *ids])]
        self.windows: list[Window] = list(sliding_windows(0, len(ids) + 1, window=window, overlap=overlap))
        self.protocol: dict[str, Setting] = {
            "window": window,
            "stride": overlap,
            "detokenizer": detokenizer,
            "first_id": start,
        }
        self.data = [hashed(file, path)]

    def figures(self, scores: WindowScores) -> Figures:
        """Return the perplexity per word of the original file, as in the paper, the bits per byte of the detokenised
        text, and the perplexity and loss per token of the model.
        """
        loss, num_tokens = float(scores.losses.sum()), len(self.texts[0]) - 1
        return Figures(
            figures={
                "perplexity": exponential(loss / self.num_words),
                "perplexity_per_token": exponential(loss / num_tokens),
                "bits_per_byte": bits_per_byte(loss, self.num_bytes),
                "loss_per_token": loss / num_tokens,
            },
            counts={
                "words": self.num_words,
                "tokens": num_tokens,
                "bytes": self.num_bytes,
                "windows": len(self.windows),
            },
        )
