"""Models of transformers: cut by their own plans and by written ones, with dropout on."""

from functools import partial
from typing import Any

import pytest
import torch

from crosscut.config import ConfigError
from crosscut.cutting import Plan, Rule, Style, cut, from_tp_plan
from crosscut.parallel import ParallelMesh
from crosscut.verification.foreign.cuts import ForeignCut
from tests.ranks import RankPool
from tests.verification.foreign.test_cuts import assert_same, prove
from tests.verification.foreign.test_transformers import build, loss_of

pytestmark = pytest.mark.slow  # every rank imports transformers


def by_own_plan(model: Any, mesh: ParallelMesh) -> None:
    from transformers.distributed import DistributedConfig

    tp_plan = model._resolve_parallel_plans(DistributedConfig(tp_size=mesh.tensor.size))[0]
    cut(model, mesh, from_tp_plan(model, tp_plan))


def test_models_are_cut_by_their_own_plans(ranks: RankPool) -> None:
    for report in prove(ranks, [ForeignCut(partial(build, kind), by_own_plan) for kind in ("llama", "phi3", "qwen3")]):
        assert_same(report)


def test_styles_of_transformers_that_no_plan_has_are_refused() -> None:
    from torch import nn

    with pytest.raises(ConfigError, match="`0` must have a style that Crosscut can cut by, but has `moe_tp_experts`"):
        from_tp_plan(nn.Sequential(nn.Linear(2, 2)), {"0": "moe_tp_experts"})


COLWISE, ROWWISE = Rule(style=Style.COLWISE), Rule(style=Style.ROWWISE)
VOCABULARY = Rule(style=Style.EMBEDDING_ROWWISE)
LOGITS = Rule(style=Style.COLWISE_GATHER_OUTPUT)


def row(name: str, *columns: str) -> dict[str, Rule]:
    parent = name.rpartition(".")[0]
    return {name: Rule(style=Style.ROWWISE, columns=tuple(f"{parent}.{column}" for column in columns))}


def columns(parent: str, *names: str) -> dict[str, Rule]:
    return {f"{parent}.{name}": COLWISE for name in names}


GPT2 = Plan(
    tensor=(2, 4),
    rules={
        "transformer.wte": VOCABULARY,
        "transformer.wpe": VOCABULARY,
        "lm_head": LOGITS,
        "transformer.h.*.attn.c_attn": Rule(style=Style.PACKED_COLWISE, parts=(16, 16, 16)),
        "transformer.h.*.mlp.c_fc": COLWISE,
        **row("transformer.h.*.attn.c_proj", "c_attn"),
        **row("transformer.h.*.mlp.c_proj", "c_fc"),
    },
    integers={"transformer.h.*.attn": {"num_heads": (2, 1), "split_size": (8, 4)}},
)
_OPT = "model.decoder.layers.*"
OPT = Plan(
    tensor=(2, 4),
    rules={
        "model.decoder.embed_tokens": VOCABULARY,
        "model.decoder.embed_positions": VOCABULARY,
        "lm_head": LOGITS,
        **columns(f"{_OPT}.self_attn", "q_proj", "k_proj", "v_proj"),
        **row(f"{_OPT}.self_attn.out_proj", "q_proj", "k_proj", "v_proj"),
        f"{_OPT}.fc1": COLWISE,
        **row(f"{_OPT}.fc2", "fc1"),
    },
    integers={f"{_OPT}.self_attn": {"num_heads": (2, 1)}},
)


def t5_rules() -> dict[str, Rule]:
    rules = {"shared": VOCABULARY, "encoder.embed_tokens": VOCABULARY, "decoder.embed_tokens": VOCABULARY}
    rules["lm_head"] = LOGITS
    for stack, layers in (("encoder", {0: "SelfAttention"}), ("decoder", {0: "SelfAttention", 1: "EncDecAttention"})):
        for number, attention in layers.items():
            parent = f"{stack}.block.*.layer.{number}.{attention}"
            rules |= {**columns(parent, "q", "k", "v"), **row(f"{parent}.o", "q", "k", "v")}
        bias = f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias"
        rules[bias] = Rule(style=Style.EMBEDDING_COLWISE)
        mlp = f"{stack}.block.*.layer.{len(layers)}.DenseReluDense"
        rules |= {**columns(mlp, "wi"), **row(f"{mlp}.wo", "wi")}
    return rules


ATTENTIONS = ("encoder.block.*.layer.0.SelfAttention", "decoder.block.*.layer.0.SelfAttention")
T5 = Plan(
    tensor=(2, 4),
    rules=t5_rules(),
    integers={
        name: {"n_heads": (2, 1), "inner_dim": (8, 4)}
        for name in (*ATTENTIONS, "decoder.block.*.layer.1.EncDecAttention")
    },
)
SMALL = {"num_hidden_layers": 2, "num_attention_heads": 4}
SHAPES: dict[str, dict[str, int]] = {
    "gpt2": {"n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 32},
    "opt": {"hidden_size": 16, "ffn_dim": 24, "word_embed_proj_dim": 16, **SMALL},
    "t5": {"d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 2, "num_heads": 4},
}


def build_old(kind: str) -> Any:
    import transformers

    config = transformers.AutoConfig.for_model(
        kind, vocab_size=50, pad_token_id=0, eos_token_id=1, bos_token_id=2, **SHAPES[kind]
    )
    config.decoder_start_token_id = 0
    kinds = transformers.AutoModelForSeq2SeqLM if kind == "t5" else transformers.AutoModelForCausalLM
    model = kinds.from_config(config, attn_implementation="eager")
    tokens = torch.randint(3, 50, (2, 7), generator=torch.Generator().manual_seed(3))
    return model, {"input_ids": tokens, "labels": tokens, "use_cache": False}, loss_of


def test_models_without_a_plan_are_cut_by_a_written_one(ranks: RankPool) -> None:
    plans = {"gpt2": GPT2, "opt": OPT, "t5": T5}
    cuts = [ForeignCut(partial(build_old, kind), partial(cut, plan=plan)) for kind, plan in plans.items()]
    for num_ranks in (2, 4):
        for report in prove(ranks, cuts, num_ranks):
            assert_same(report)
