"""Keys of `generation_config.json`."""

from crosscut.config.published.keys.form import Keys, because

GENERATION = Keys(
    title="`generation_config.json`",
    used=because({"a text ends with these ids": "eos_token_id"}),
)
