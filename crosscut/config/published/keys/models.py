"""Keys of `config.json`, by family."""

from functools import cache

from crosscut.config.published.families import Family
from crosscut.config.published.keys.form import Keys, because

_USED = because(
    {
        "the family": "model_type",
        "the head of the model": "architectures",
        "the names of the classes": "id2label num_labels",
        "a head for classes is read only if each text has one class": "problem_type",
        "a text ends with these ids": "eos_token_id",
        "a text begins with this id": "bos_token_id",
        "whether the output projection is the embedding": "tie_word_embeddings",
    }
)
_ROTARY = because(
    {
        "rotary positions": "rope_parameters rope_theta rope_scaling partial_rotary_factor",
    }
)
_WINDOW = because(
    {
        "the longest sequence is the sliding window": "sliding_window use_sliding_window",
        "only for the layers of a sliding window, and Crosscut reads no sequence that is longer than the window": (
            "max_window_layers layer_types"
        ),
    }
)

_ONLY: dict[str, tuple[object, ...]] = {
    "is_encoder_decoder": (False, None),
    "per_layer_config": (None, {}),
    "tie_encoder_decoder": (False, None),
    "pruned_heads": ({}, None),
    "is_causal": (None,),
    "use_bidirectional_attention": (False, None),
}
"""Keys of every family that change what a model computes."""

_WITHOUT_EFFECT = because(
    {
        "says who wrote the file": "transformers_version _name_or_path name_or_path _commit_hash",
        "the type of the stored values is in the weights' own files": "dtype torch_dtype",
        "the inverse of `id2label`": "label2id",
        "the form of the outputs in Python": (
            "output_hidden_states output_attentions return_dict use_return_dict torchscript tie_last_hidden_states"
        ),
        "the same numbers in parts": "chunk_size_feed_forward pretraining_tp",
        "initial values of new weights": "initializer_range initializer_factor",
        "Crosscut always keeps keys and values": "use_cache cache_implementation",
        "the implementation of the same numbers": (
            "attn_implementation _attn_implementation _attn_implementation_autoset use_bfloat16 use_flash_attention"
        ),
        "Crosscut masks padding by its own mask": "pad_token_id sep_token_id cls_token_id decoder_start_token_id",
        "where a program finds Python code; Crosscut runs none": "auto_map custom_pipelines",
        "examples for the tasks of `pipeline`": "task_specific_params finetuning_task tokenizer_class prefix",
        "only in training, where Crosscut has one rate (`model.dropout`)": "classifier_dropout attention_dropout",
    }
)


@cache
def keys_of_model(family: Family) -> Keys:
    """Table of the keys of a family's `config.json`."""
    fields = {key: f"`model.{field}`" for field, key in family.keys.items()}
    biases = dict.fromkeys(family.biases, "`model.biases`")
    rotary = _ROTARY | _WINDOW if family.fixed["positions"] == "rotary" else {}
    dropouts = dict.fromkeys(family.dropouts, _WITHOUT_EFFECT["attention_dropout"])
    return Keys(
        title=f"`config.json` of `{family.model_type}`",
        used={**_USED, **rotary, **biases, **fields},
        only={**_ONLY, **family.required},
        without_effect={key: reason for key, reason in {**_WITHOUT_EFFECT, **dropouts}.items() if key not in fields},
    )
