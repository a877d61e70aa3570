"""Begin-of-text and end-of-text tokens from the files in a model's folder. The files are read in the same way as in
`transformers`.
"""

from pathlib import Path

from crosscut.config.published.folders import SPECIAL_TOKENS_FILE, TOKENIZER_CONFIG_FILE
from crosscut.config.system.files import read_json
from crosscut.data import Tokenizer
from crosscut.data.tokenization.end_of_text import token_in


def named_ids(path: Path, tokenizer: Tokenizer) -> dict[str, int | None]:
    """Return the ids of `bos_token` and `eos_token` from the files beside the `tokenizer.json` at `path`.

    An id is None if the files set the token to null, or if the token is not in the vocabulary. Tokens that the files do
    not mention are missing from the result. Raises `ConfigError` for a file that is not valid JSON.
    """
    file = path.with_name(TOKENIZER_CONFIG_FILE)
    settings = _read(file)
    if "added_tokens_decoder" not in settings:
        settings |= _read(path.with_name(SPECIAL_TOKENS_FILE))
    names = [name for name in ("bos_token", "eos_token") if name in settings]
    return {name: _id(token_in(settings, name, file), tokenizer) for name in names}


def _id(text: str, tokenizer: Tokenizer) -> int | None:
    ids = tokenizer.encode_prompt(text) if text else []
    return ids[0] if len(ids) == 1 else None


def _read(path: Path) -> dict[str, object]:
    return read_json(path) if path.is_file() else {}
