"""Keys of `tokenizer_config.json` and `special_tokens_map.json`, which are beside `tokenizer.json`."""

from crosscut.config.published.keys.form import Keys, because

_TOKENS = because(
    {
        "a text ends with this token": "eos_token",
        "a text begins with this token in chat templates and in `lm-eval`": "bos_token",
        "a chat template may write these tokens by name, as every other key that ends in `_token`": (
            "unk_token sep_token pad_token cls_token mask_token extra_special_tokens model_specific_special_tokens"
        ),
    }
)
_NAMES = because({"`tokenizer.json` has these tokens; tokens that it lacks are named": "additional_special_tokens"})
_COMPARED = because(
    {
        "must be as in the steps of `tokenizer.json`": (
            "do_lower_case strip_accents tokenize_chinese_chars add_prefix_space"
        )
    }
)

TOKENIZER = Keys(
    title="`tokenizer_config.json`",
    used={
        **_TOKENS,
        **_COMPARED,
        **because(
            {
                "templates of conversations": "chat_template",
                "names of special tokens in a prompt are then plain text": "split_special_tokens",
                "tokens that `tokenizer.json` lacks or describes in another way are named; `special_tokens_map.json` "
                "is then ignored": "added_tokens_decoder",
                "`embed` cuts longer texts": "model_max_length max_len",
                "`embed` cuts a text on this side": "truncation_side",
                "the steps of this class are compared with `tokenizer.json`": "tokenizer_class",
                "true is named, since `transformers` then changes the words of large tokenizers": "fix_mistral_regex",
            }
        ),
    },
    only={"gguf_file": (None,)},
    without_effect={
        **_NAMES,
        **because(
            {
                "the template in `tokenizer.json` adds the tokens": "add_bos_token add_eos_token",
                "`tokenizer.json` decides": (
                    "backend vocab merges vocab_file merges_file vocab_size legacy "
                    "use_fast sp_model_kwargs from_slow do_basic_tokenize never_split wordpieces_prefix trim_offsets "
                    "unk_id tokenizer_file special_tokens_map_file add_special_tokens errors remove_space keep_accents "
                    "add_dummy_prefix_space tokenizer_object"
                ),
                "Crosscut pads and cuts by its own rules": (
                    "padding padding_side pad_to_multiple_of pad_token_type_id truncation "
                    "truncation_strategy stride max_length tokenizer_padding tokenizer_truncation"
                ),
                "only the form of decoded texts; Crosscut decodes as `tokenizer.json` says": (
                    "clean_up_tokenization_spaces spaces_between_special_tokens "
                    "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output"
                ),
                "Crosscut gives token types to each model that has them": "model_input_names",
                "other programs read it": (
                    "auto_map processor_class response_template response_schema chat_control_tokens verbose "
                    "use_default_system_prompt"
                ),
                "says who wrote the file": "name_or_path transformers_version files_loaded is_local local_files_only",
            }
        ),
    },
)
SPECIAL_TOKENS = Keys(title="`special_tokens_map.json`", used=_TOKENS, without_effect=_NAMES)
