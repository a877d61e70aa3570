"""Keys of `generation_config.json`, with which `transformers` generates text unless a program says otherwise."""

from collections.abc import Mapping

from crosscut.config.published.keys.form import Keys, because

_ONLY: Mapping[str, tuple[object, ...]] = {
    **dict.fromkeys(("num_beams", "num_beam_groups"), (1,)),
    "guidance_scale": (1,),
    **dict.fromkeys(("suppress_tokens", "begin_suppress_tokens", "bad_words_ids", "force_words_ids"), ([],)),
    **dict.fromkeys(
        (
            "min_length", "min_new_tokens", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size",
            "diversity_penalty", "penalty_alpha",
        ),
        (0,),
    ),
    **dict.fromkeys(
        (
            "forced_bos_token_id", "forced_eos_token_id", "exponential_decay_length_penalty", "sequence_bias",
            "watermarking_config", "constraints", "dola_layers", "assistant_ensemble_weight", "max_time",
        ),
        (),
    ),
    "token_healing": (False,),
}  # fmt: skip

SAMPLING_WITHOUT_OPTION: Mapping[str, object] = {
    "min_p": 0, "typical_p": 1, "top_h": None, "epsilon_cutoff": 0, "eta_cutoff": 0, "encoder_repetition_penalty": 1,
}  # fmt: skip
"""Keys that say how a token is sampled, and for which Crosscut has no option, with the value that changes nothing."""

GENERATION = Keys(
    title="`generation_config.json`",
    used=because(
        {
            "a text ends with these ids": "eos_token_id",
            "a suggestion that is named; the option or the request decides": (
                "do_sample temperature top_k top_p repetition_penalty stop_strings"
            ),
            "a suggestion that is named; Crosscut has no such option": " ".join(SAMPLING_WITHOUT_OPTION),
        }
    ),
    only={key: (*values, None) for key, values in _ONLY.items()},
    without_effect=because(
        {
            "a prompt begins as the tokenizer's template says": "bos_token_id decoder_start_token_id",
            "Crosscut has its own mask for padding": "pad_token_id",
            "`--tokens` and `--samples`, or the request, decide": "max_length max_new_tokens num_return_sequences",
            "belongs to the search with beams": "early_stopping length_penalty",
            "the same probabilities in another scale": "renormalize_logits",
            "Crosscut stops with an error if a score is not a number": "remove_invalid_values",
            "another implementation of the same numbers": (
                "use_cache cache_implementation cache_config max_cache_len use_mtp compile_config disable_compile "
                "continuous_batching_config low_memory prefill_chunk_size is_assistant num_assistant_tokens "
                "num_assistant_tokens_schedule assistant_confidence_threshold prompt_lookup_num_tokens "
                "max_matching_ngram_size assistant_early_exit assistant_lookbehind target_lookbehind speculation_type"
            ),
            "the form of outputs in Python": (
                "output_attentions output_hidden_states output_scores output_logits return_dict_in_generate"
            ),
            "says who wrote the file": "transformers_version _from_model_config",
        }
    ),
    remedy="Remove the key from the file to generate text without it.",
)
