"""Names of all keys of a config, and a search for the key that a user meant.

Users type a key without its section, in the wrong section, with a typo, or under the name that it has in another
program.
"""

import dataclasses
import difflib
import typing
from collections.abc import Iterable, Sequence
from functools import cache
from types import MappingProxyType

from crosscut.config.checks import listed
from crosscut.config.model import ModelConfig

_LONGEST_NAME = 100
"""Longest name that is compared with the keys, in characters. The comparison takes quadratic time."""

_SAME_SECTION = 0.15
"""Bonus that is added to the similarity of a key if the key is in the section that the user named. For comparison:
identical names have a similarity of 1."""

_CLOSE = 0.6
"""Minimum similarity of two names for a suggestion."""

SYNONYMS = MappingProxyType(
    {
        "model.preset": "model model_name arch architecture",
        "model.num_layers": "n_layer n_layers num_hidden_layers depth",
        "model.hidden_size": "hidden n_embd d_model dim embed_dim",
        "model.num_heads": "heads n_head n_heads num_attention_heads",
        "model.num_kv_heads": "kv_heads n_kv_heads num_key_value_heads num_query_groups",
        "model.head_size": "head_dim kv_channels",
        "model.mlp_size": "ffn d_ff n_inner ffn_hidden_size intermediate_size",
        "model.layers": "mlp mlp_pattern hidden_act activation layer_types",
        "model.max_sequence_length": "n_ctx n_positions max_position_embeddings max_seq_len block_size",
        "model.logit_softcap": "final_logit_softcapping logit_soft_cap softcap soft_cap logits_soft_cap",
        "model.rotary_base": "theta rope_theta rotary_theta",
        "model.rotary_fraction": "partial_rotary_factor rotary_pct rotary_percent",
        "model.attention_gate": "attn_output_gate",
        "model.sliding_attention.window": "sliding_window",
        "model.rotary_factor": "rope_factor rope_scaling_factor rotary_scaling_factor",
        "model.rotary_scaling": "rope_scaling rope_type rope_parameters",
        "model.rotary_original_length": "original_max_position_embeddings",
        "layout.tensor": "tp tp_size tensor_parallel tensor_parallel_size tensor_model_parallel_size",
        "layout.data": "dp dp_size data_parallel data_parallel_size",
        "layout.pipeline": "pp pp_size pipeline_parallel pipeline_model_parallel_size",
        "layout.stages_per_rank": "vpp virtual_pipeline_model_parallel_size num_model_chunks",
        "layout.schedule": "pipeline_schedule pipeline_parallel_schedule",
        "layout.context": "cp cp_size context_parallel context_parallel_size",
        "layout.expert": "ep ep_size expert_parallel expert_model_parallel_size",
        "layout.sequence_parallel": "sp",
        "layout.sharding": "zero zero_stage fsdp",
        "data.text": "dataset data_path data_dir train_file train_data",
        "data.vocab_size": "vocab",
        "training.steps": "max_steps num_steps train_steps iters max_iters train_iters epochs num_epochs",
        "training.batch_size": "batch_size bs batch gbs global_batch_size",
        "training.micro_batch_size": "mbs micro_batch micro_bs per_device_train_batch_size gradient_accumulation_steps",
        "training.sequence_length": "seq_len seqlen seq_length context_length max_length",
        "training.initialize_from": "init_from from_pretrained pretrained finetune_from",
        "training.precision": "dtype amp bf16 fp16 fp8 mixed_precision",
        "training.recompute": "activation_checkpointing gradient_checkpointing grad_checkpointing",
        "training.z_loss": "z_loss_weight z_loss_coefficient zloss",
        "training.compile": "torch_compile",
        "training.validate_every": "eval_interval eval_steps val_interval eval_every",
        "optimizer.learning_rate": "lr max_lr base_lr peak_lr",
        "optimizer.min_learning_rate": "min_lr lr_min final_lr",
        "optimizer.warmup_steps": "warmup warmup_iters lr_warmup_iters num_warmup_steps",
        "optimizer.schedule": "lr_scheduler lr_scheduler_type lr_decay_style",
        "optimizer.decay_steps": "lr_decay_iters cooldown_steps lr_wsd_decay_iters",
        "optimizer.embedding_learning_rate": "embedding_lr embed_lr",
        "optimizer.head_learning_rate": "unembedding_lr head_lr lm_head_lr",
        "optimizer.matrix_learning_rate": "matrix_lr",
        "optimizer.scalar_learning_rate": "scalar_lr",
        "optimizer.weight_decay": "wd",
        "optimizer.beta1": "adam_beta1 betas",
        "optimizer.beta2": "adam_beta2",
        "optimizer.epsilon": "eps adam_eps adam_epsilon",
        "optimizer.ema_decay": "ema averaging_decay model_ema_decay weight_averaging",
        "optimizer.clip_norm": "clip clip_grad grad_clip gradient_clip max_grad_norm max_norm",
        "checkpoint.every": "save_interval save_steps save_every checkpoint_interval",
        "output.folder": "folder out out_dir output_dir save_dir",
    }
)
"""Names of each key in other programs."""

_BY_SYNONYM = MappingProxyType({name: key for key, names in SYNONYMS.items() for name in names.split()})


@cache
def keys_of(kind: type, prefix: str = "") -> tuple[str, ...]:
    """Dotted names of all keys of a config dataclass, in the order of its fields. Each name starts with `prefix`."""
    keys: list[str] = []
    hints = typing.get_type_hints(kind)
    for field in dataclasses.fields(kind):
        section = section_of(hints[field.name])
        name = f"{prefix}{field.name}"
        keys += [name] if section is None else keys_of(section, f"{name}.")
    return (*keys, f"{prefix}preset") if kind is ModelConfig else tuple(keys)


def section_of(annotation: object) -> type | None:
    """Return the dataclass of a config field that is a section or an array of sections. `annotation` is the field's
    type: a dataclass such as `Layout` for a section, or `tuple[MixedFolder, ...]` for an array of sections. None for
    other types, such as `int`.
    """
    kind = (*typing.get_args(annotation), annotation)[0]
    return kind if isinstance(kind, type) and dataclasses.is_dataclass(kind) else None


def meant_keys(name: str, keys: Sequence[str]) -> list[str]:
    """Keys that a user may have meant by an unknown name. Empty if no key is similar.

    The search tries four explanations in this order: the name of the key in another program, a missing or wrong
    section, a missing dot, and a typo.
    """
    name = name.lower().replace("-", "_")
    last = name.rpartition(".")[2]
    if len(name) > _LONGEST_NAME:
        return []
    if (key := _BY_SYNONYM.get(last, "")) in keys:
        return [key]
    if same := [key for key in keys if key.rpartition(".")[2] == last]:
        return same
    if together := [key for key in keys if _joined(key) == _joined(name)]:
        return together
    scores = {key: _similarity(name, key) for key in keys}
    best = max(scores, key=scores.__getitem__, default="")
    return [best] if best and scores[best] >= _CLOSE else []


def _joined(name: str) -> str:
    """Remove the dots and underscores from a key."""
    return name.replace(".", "").replace("_", "")


def _similarity(name: str, key: str) -> float:
    """Similarity of the last parts of two names, plus a bonus if both names have the same section."""
    (section, _, last), (of, _, key_last) = name.rpartition("."), key.rpartition(".")
    return difflib.SequenceMatcher(None, last, key_last).ratio() + (_SAME_SECTION if section == of != "" else 0)


def nearest(word: str, known: Iterable[str]) -> list[str]:
    """The word in `known` that is most similar to `word`. Empty if no word is similar."""
    return difflib.get_close_matches(word[:_LONGEST_NAME], list(known), n=1, cutoff=0.5)


def advice(found: Sequence[str], choices: Iterable[str] = ()) -> str:
    """Sentence for the end of a message, starting with a space. It names the keys in `found` or, if this list is empty,
    the `choices`. Empty if both are empty.
    """
    if not found:
        words = [f"`{name}`" for name in choices]
        return f" Choose {listed(words)}." if words else ""
    verb = "is" if len(found) == 1 else "are"
    return f" The nearest {verb} {quoted(found)}."


def quoted(names: Sequence[str]) -> str:
    """Join names in backticks, as in a sentence: `a`, `b` and `c`."""
    words = [f"`{name}`" for name in names]
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)
