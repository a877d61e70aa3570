"""Keys of the files that sentence-transformers writes beside a model: the list of modules, and each module's file."""

from types import MappingProxyType

from crosscut.config.published.keys.form import Keys, because

MODULES = Keys(
    title="`modules.json`, for each module",
    used=because({"the kind of the module": "type"}),
    without_effect=because({"names and numbers the module": "idx name path"}),
)
LENGTH = Keys(
    title="`sentence_bert_config.json`",
    used=because({"the maximum number of tokens of a text": "max_seq_length"}),
)
SENTENCE = Keys(title="`config_sentence_transformers.json`", used={})
POOLING = Keys(
    title="`config.json` of the module `Pooling`",
    used=because({"which hidden states make an embedding": "pooling_mode_mean_tokens"}),
)

SENTENCES = MappingProxyType(
    {
        "modules.json": MODULES,
        "sentence_bert_config.json": LENGTH,
        "config_sentence_transformers.json": SENTENCE,
        "1_Pooling/config.json": POOLING,
    }
)
"""Tables by the name of the file, or by the usual name."""
