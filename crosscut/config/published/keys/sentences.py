"""Keys of the files that sentence-transformers writes beside a model: the list of modules, and each module's file."""

from types import MappingProxyType

from crosscut.config.published.keys.form import Keys, because

_REMEDY = "Choose another model, or compute the embeddings with sentence-transformers."
_NAMES = {"module_input_name": ("sentence_embedding",), "module_output_name": ("sentence_embedding", None)}
_FORWARD = {"method": "forward", "method_output_name": "last_hidden_state"}

MODULES = Keys(
    title="`modules.json`, for each module",
    used=because(
        {
            "the kind of the module": "type",
            "the folder of the module's own files": "path",
            "each module must have a name of its own": "name",
        }
    ),
    without_effect=because({"numbers the module": "idx", "arguments of the library's `encode`": "kwargs"}),
    remedy=_REMEDY,
)
TRANSFORMER = Keys(
    title="`sentence_bert_config.json`",
    used=because(
        {"the maximum number of tokens of a text": "max_seq_length", "texts are put in lower case": "do_lower_case"}
    ),
    only={
        "transformer_task": ("feature-extraction",),
        "modality_config": ({"text": _FORWARD},),
        "module_output_name": ("token_embeddings",),
        "tokenizer_name_or_path": (None,),
        **dict.fromkeys(("processing_kwargs", "model_kwargs", "processor_kwargs", "config_kwargs"), ({}, None)),
        **dict.fromkeys(("model_args", "tokenizer_args", "config_args"), ({}, None)),
    },
    without_effect=because(
        {
            "only for `encode_query` and `encode_document`": "query_length document_length query_expansion",
            "the same numbers without padding": "unpad_inputs",
        }
    ),
    remedy=_REMEDY,
)
SENTENCE = Keys(
    title="`config_sentence_transformers.json`",
    used=because(
        {
            "texts that precede a text, by name": "prompts",
            "the prompt of every text": "default_prompt_name",
            "an embedding keeps only its first dimensions": "truncate_dim",
        }
    ),
    only={"model_type": ("SentenceTransformer",)},
    without_effect=because(
        {"says who wrote the file": "__version__", "Crosscut compares no embeddings": "similarity_fn_name"}
    ),
    remedy=_REMEDY,
)
POOLING = Keys(
    title="`config.json` of the module `Pooling`",
    used=because(
        {
            "which hidden states make an embedding": "pooling_mode",
            "older spelling of `pooling_mode`": (
                "pooling_mode_cls_token pooling_mode_max_tokens pooling_mode_mean_tokens "
                "pooling_mode_mean_sqrt_len_tokens pooling_mode_weightedmean_tokens pooling_mode_lasttoken"
            ),
            "whether the tokens of the prompt count": "include_prompt",
        }
    ),
    without_effect=because({"is the model's hidden size": "embedding_dimension word_embedding_dimension"}),
    remedy=_REMEDY,
)
DENSE = Keys(
    title="`config.json` of the module `Dense`",
    used=because(
        {
            "the shape of the layer": "in_features out_features bias",
            "the function after the layer": "activation_function",
            "whether the layer's input is added": "use_residual",
        }
    ),
    only=_NAMES,
    remedy=_REMEDY,
)
NORMALIZE = Keys(
    title="`config.json` of the module `Normalize`",
    used={},
    only=_NAMES,
    remedy=_REMEDY,
)

SENTENCES = MappingProxyType(
    {
        "modules.json": MODULES,
        "sentence_bert_config.json": TRANSFORMER,
        "config_sentence_transformers.json": SENTENCE,
        "1_Pooling/config.json": POOLING,
        "2_Dense/config.json": DENSE,
        "3_Normalize/config.json": NORMALIZE,
    }
)
"""Tables by the name of the file, or by the usual name."""
