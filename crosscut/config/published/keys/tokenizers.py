"""Keys of `tokenizer_config.json` and `special_tokens_map.json`, which are beside `tokenizer.json`."""

from crosscut.config.published.keys.form import Keys, because

_TOKENS = because({"a text ends with this token": "eos_token"})

TOKENIZER = Keys(title="`tokenizer_config.json`", used=_TOKENS)
SPECIAL_TOKENS = Keys(title="`special_tokens_map.json`", used=_TOKENS)
