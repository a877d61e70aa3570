"""Keys of the section for rotary positions in `config.json`: `rope_parameters`, or `rope_scaling` in older files."""

from crosscut.config.published.keys.form import Keys, because

ROTARY = Keys(
    title="`rope_parameters` and `rope_scaling` in `config.json`",
    used=because(
        {
            "`model.rotary_base`": "rope_theta",
            "`model.rotary_scaling`": "rope_type type",
            "`model.rotary_factor`": "factor",
            "`model.rotary_original_length`": "original_max_position_embeddings",
            "`model.rotary_attention_factor`": "attention_factor mscale mscale_all_dim",
            "must be 32 for YaRN": "beta_fast",
            "must be 1 for YaRN": "beta_slow",
            "must be true for YaRN": "truncate",
            "must be 1 for Llama 3": "low_freq_factor",
            "must be 4 for Llama 3": "high_freq_factor",
            "the fraction of a head that is rotated, which must be the family's": "partial_rotary_factor",
        }
    ),
    only=dict.fromkeys(
        ("mrope_section", "short_factor", "long_factor", "full_attention", "sliding_attention", "chunked_attention"),
        (None,),
    ),
    without_effect=because({"says how the frequencies were chosen": "finetuned"}),
)
