"""Keys of the files beside a model's weights: one table per format says what Crosscut does with each key.

Each key is used, or has no effect, or is refused unless it has a value that changes nothing. A key that no table lists
is named in one line, and stops nothing. The tables are printed in docs/tables/keys.md.
"""

from crosscut.config.published.keys.adapters import ADAPTER
from crosscut.config.published.keys.form import Keys, because
from crosscut.config.published.keys.generation import GENERATION
from crosscut.config.published.keys.models import keys_of_model
from crosscut.config.published.keys.rotary import ROTARY
from crosscut.config.published.keys.sentences import SENTENCES
from crosscut.config.published.keys.tokenizers import SPECIAL_TOKENS, TOKENIZER

__all__ = [
    "ADAPTER",
    "GENERATION",
    "ROTARY",
    "SENTENCES",
    "SPECIAL_TOKENS",
    "TOKENIZER",
    "Keys",
    "because",
    "keys_of_model",
]
