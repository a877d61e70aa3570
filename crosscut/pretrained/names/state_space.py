"""Names of the tensors of families with state-space layers."""

from dataclasses import replace

from crosscut.pretrained.names.attention import LLAMA
from crosscut.pretrained.names.experts import PLAIN, experts_in, granite_experts, with_bias
from crosscut.pretrained.names.source import OUTPUT, Source, Stack, TensorNames


def _mixer(module: str) -> dict[str, tuple[Source, ...]]:
    """Sources of a state-space mixer in the published module `module`."""
    gate, inner, b, c, step = (Source(f"{module}.in_proj", part, stack=Stack.MIXER) for part in range(5))
    taps, b_taps, c_taps = (
        Source(f"{module}.conv1d", part, stack=Stack.CHANNELS, has_channel=True) for part in range(3)
    )
    return {
        "attention.inputs.gate": (gate,),
        "attention.inputs.inner": (inner,),
        "attention.inputs.bc": (b, c),
        "attention.inputs.step": (step,),
        "attention.convolution": (taps,),
        "attention.bc_convolution": (b_taps, c_taps),
        "attention.log_rate": (Source(f"{module}.A_log"),),
        "attention.skip": (Source(f"{module}.D"),),
        "attention.step_bias": (Source(f"{module}.dt_bias"),),
        "attention.norm": (Source(f"{module}.norm"),),
        "attention.output": (Source(f"{module}.out_proj"),),
    }


def _selective_mixer(module: str) -> dict[str, tuple[Source, ...]]:
    """Sources of a state-space mixer of the first kind in the published module `module`."""
    inner, gate = (Source(f"{module}.in_proj", part, stack=Stack.INNER_GATE) for part in range(2))
    return {
        "attention.inputs.gate": (gate,),
        "attention.inputs.inner": (inner,),
        "attention.convolution": (Source(f"{module}.conv1d", has_channel=True),),
        "attention.selection": (Source(f"{module}.x_proj"),),
        "attention.step_norm": (Source(f"{module}.dt_layernorm"),),
        "attention.b_norm": (Source(f"{module}.b_layernorm"),),
        "attention.c_norm": (Source(f"{module}.c_layernorm"),),
        "attention.step": (Source(f"{module}.dt_proj"),),
        "attention.step_bias": (Source(f"{module}.dt_proj.bias"),),
        "attention.log_rate": (Source(f"{module}.A_log"),),
        "attention.skip": (Source(f"{module}.D"),),
        "attention.output": (Source(f"{module}.out_proj"),),
    }


NEMOTRON_H = TensorNames(
    prefix="backbone.",
    layer="layers.{}.",
    root={"tokens": Source("embeddings"), "final_norm": Source("norm_f"), "output": OUTPUT},
    block={
        "attention_norm": (Source("norm"),),
        "attention.qkv.query": (Source("mixer.q_proj"),),
        "attention.qkv.key_value": (Source("mixer.k_proj"), Source("mixer.v_proj")),
        "attention.output": (Source("mixer.o_proj"),),
        "mlp_norm": (Source("norm"),),
        "mlp.expand": (Source("mixer.up_proj"),),
        "mlp.contract": (Source("mixer.down_proj"),),
    },
    kinds={
        "mamba2": _mixer("mixer"),
        "experts": with_bias(experts_in("mixer", names=PLAIN, shared="shared_experts"), "mixer.gate"),
    },
    buffers="",
)
"""Names of Mamba-2, too, which has only one kind of layer."""
BAMBA = replace(
    LLAMA,
    root={**LLAMA.root, "final_norm": Source("final_layernorm")},
    block={
        **LLAMA.block,
        "mlp_norm": (Source("pre_ff_layernorm"),),
        "mlp.expand.gate": (Source("feed_forward.gate_proj"),),
        "mlp.expand.up": (Source("feed_forward.up_proj"),),
        "mlp.contract": (Source("feed_forward.down_proj"),),
    },
    kinds={"mamba2": _mixer("mamba")},
)
MAMBA = replace(NEMOTRON_H, kinds={"mamba": _selective_mixer("mixer")})
GRANITE = replace(
    LLAMA,
    block={
        **LLAMA.block,
        "mlp.expand.gate": (Source("shared_mlp.input_linear", 0, stack=Stack.GATE_UP),),
        "mlp.expand.up": (Source("shared_mlp.input_linear", 1, stack=Stack.GATE_UP),),
        "mlp.contract": (Source("shared_mlp.output_linear"),),
    },
    kinds={"mamba2": _mixer("mamba"), "experts": granite_experts(shared="shared_mlp")},
)
JAMBA = replace(
    LLAMA,
    root={**LLAMA.root, "final_norm": Source("final_layernorm")},
    block={
        **LLAMA.block,
        "mlp_norm": (Source("pre_ff_layernorm"),),
        "mlp.expand.gate": (Source("feed_forward.gate_proj"),),
        "mlp.expand.up": (Source("feed_forward.up_proj"),),
        "mlp.contract": (Source("feed_forward.down_proj"),),
    },
    kinds={"mamba": _selective_mixer("mamba"), "experts": experts_in("feed_forward", router="router")},
)
