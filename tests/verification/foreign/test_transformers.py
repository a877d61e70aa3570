"""Models of transformers, cut by their own plans."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from crosscut.parallel import ParallelMesh
from crosscut.verification.foreign.cuts import ForeignCut
from tests.ranks import RankPool
from tests.verification.foreign.test_cuts import assert_same, prove

pytestmark = pytest.mark.slow  # every rank imports transformers


def build(kind: str) -> Any:
    import transformers

    shape = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.AutoConfig.for_model(
        kind, vocab_size=48, num_key_value_heads=2, pad_token_id=0, attention_dropout=0.0, **shape
    )
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    tokens = torch.randint(1, 48, (2, 7), generator=torch.Generator().manual_seed(3))
    return model, {"input_ids": tokens, "labels": tokens, "use_cache": False}, loss_of


def loss_of(output: Any) -> Tensor:
    loss: Tensor = output.loss
    return loss


def by_own_plan(model: Any, mesh: ParallelMesh, **changes: str) -> None:
    """Cut a model as `from_pretrained` with `DistributedConfig(tp_plan="auto")` does, with other styles for the modules
    whose names end with the names in `changes`.
    """
    from transformers.distributed import DistributedConfig
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    plan = dict(model._resolve_parallel_plans(DistributedConfig(tp_size=mesh.tensor.size))[0])
    for name in plan:
        plan[name] = next((style for end, style in changes.items() if f"{end}." in f"{name}."), plan[name])
    apply_tensor_parallelism(model, mesh.tensor.device_mesh, plan)


def cut_of(kind: str, **changes: str) -> ForeignCut:
    return ForeignCut(partial(build, kind), partial(by_own_plan, **changes))


FAULTS = [
    (cut_of("llama", q_proj="rowwise", o_proj="colwise"), "model.layers.0.self_attn.q_proj"),
    (cut_of("llama", k_proj="replicate"), "model.layers.0.self_attn"),
    (cut_of("llama", lm_head="colwise"), "LlamaForCausalLM"),
    (cut_of("phi3", gate_up_proj="colwise"), "model.layers.0.mlp"),
    (cut_of("qwen3", q_norm="replicate"), "model.layers.1.self_attn.q_norm"),
]


def test_models_cut_by_their_own_plans_pass_and_changed_plans_do_not(ranks: RankPool) -> None:
    right = [cut_of("llama"), cut_of("phi3"), cut_of("qwen3")]
    reports = prove(ranks, [*right, *(cut for cut, _ in FAULTS)])
    for report in reports[: len(right)]:
        assert_same(report)
    found = [report.first and report.first.module for report in reports[len(right) :]]
    assert found == [module for _, module in FAULTS]
