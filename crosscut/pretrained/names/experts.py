"""Names of the tensors of mixtures of experts, and of families whose layers are attention and a mixture of experts."""

from dataclasses import replace

from crosscut.pretrained.names.attention import LLAMA
from crosscut.pretrained.names.source import Source, Stack, TensorNames

Sources = dict[str, tuple[Source, ...]]
"""Sources of the modules of a layer."""

_GATED = {"gate": "gate_proj", "up": "up_proj", "contract": "down_proj"}
"""Names of an expert's matrices in most families, by Crosscut's names."""
PLAIN = {"expand": "up_proj", "contract": "down_proj"}
"""Names of the matrices of an expert without a gate."""


def experts_in(module: str, *, router: str = "gate", names: dict[str, str] = _GATED, shared: str = "") -> Sources:
    """Return the sources of the experts in the published module `module`, each of which has tensors of its own.
    `router` is the name of the router in the module, `names` are the names of an expert's matrices, and `shared` is the
    name of the MLP that all tokens pass through. Empty without such an MLP.
    """
    found: Sources = {"mlp.router": (Source(f"{module}.{router}"),)}
    for ours, theirs in names.items():
        found[f"mlp.{ours}"] = (Source(f"{module}.experts.{{}}.{theirs}.weight"),)
        if shared:
            part = ours if ours in ("expand", "contract") else f"expand.{ours}"
            found[f"mlp.shared.{part}"] = (Source(f"{module}.{shared}.{theirs}"),)
    return found


def with_bias(experts: Sources, module: str) -> Sources:
    """Return the sources of experts, with the bias of each expert's score."""
    return {**experts, "mlp.router.bias": (Source(f"{module}.e_score_correction_bias"),)}


def granite_experts(*, shared: str = "") -> Sources:
    """Return the sources of Granite's experts. A tensor stacks the gates and the other first matrices of all of them.
    `shared` is the name of the module of the MLP that all tokens pass through. Empty without such an MLP.
    """
    module = "block_sparse_moe"
    gate, up = (
        Source(f"{module}.input_linear.weight", part, stack=Stack.EXPERT_GATE_UP, of_all=True) for part in range(2)
    )
    found: Sources = {
        "mlp.router": (Source(f"{module}.router.layer"),),
        "mlp.gate": (gate,),
        "mlp.up": (up,),
        "mlp.contract": (Source(f"{module}.output_linear.weight", of_all=True),),
    }
    if shared:
        for part, name in enumerate(("gate", "up")):
            source = Source(f"{shared}.input_linear", part, stack=Stack.SHARED_GATE_UP)
            found[f"mlp.shared.expand.{name}"] = (source,)
        found["mlp.shared.contract"] = (Source(f"{shared}.output_linear"),)
    return found


def _of(experts: Sources) -> TensorNames:
    return replace(LLAMA, kinds={"experts": experts})


QWEN_SHARED = {
    **experts_in("mlp", shared="shared_expert"),
    "mlp.shared_gate": (Source("mlp.shared_expert_gate"),),
}
"""Sources of the experts of Qwen2-MoE and Qwen3-Next."""
MIXTRAL = _of(experts_in("block_sparse_moe", names={"gate": "w1", "up": "w3", "contract": "w2"}))
QWEN3_MOE = _of(experts_in("mlp"))
"""Names of OLMoE, too."""
QWEN2_MOE = _of(QWEN_SHARED)
GRANITE_MOE = _of(granite_experts())
