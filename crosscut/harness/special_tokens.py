"""Begin-of-text and end-of-text tokens from the files in a model's folder. The files are read in the same way as in
`transformers`.
"""

from pathlib import Path

from crosscut.config.published.special_names import special_names
from crosscut.data import Tokenizer


def named_ids(path: Path, tokenizer: Tokenizer) -> dict[str, int | None]:
    """Return the ids of `bos_token` and `eos_token` from the files beside the `tokenizer.json` at `path`.

    An id is None if the files set the token to null, or if the token is not in the vocabulary. Tokens that the files do
    not mention are missing from the result. Raises `ConfigError` for a file that is not valid JSON.
    """
    named = special_names(path.parent).named
    return {name: tokenizer.id_of(named[name].content) for name in ("bos_token", "eos_token") if name in named}
