"""Names of the tensors of families with gated delta nets."""

from dataclasses import replace

from crosscut.pretrained.names.attention import LLAMA, OLMO2
from crosscut.pretrained.names.experts import QWEN_SHARED
from crosscut.pretrained.names.source import Source, Stack, TensorNames

_MODULE = "linear_attn"


def _of_both(norm: str, output: str) -> dict[str, tuple[Source, ...]]:
    """Sources of a gated delta net that have the same names in both families, but for the norm and the output."""
    return {
        "attention.log_rate": (Source(f"{_MODULE}.A_log"),),
        "attention.step_bias": (Source(f"{_MODULE}.dt_bias"),),
        "attention.norm": (Source(f"{_MODULE}.{norm}"),),
        "attention.output": (Source(f"{_MODULE}.{output}"),),
    }


def _stacked(name: str, stack: Stack, number: int) -> list[Source]:
    has_channel = stack is Stack.DELTA_CHANNELS
    return [Source(f"{_MODULE}.{name}", part, stack=stack, has_channel=has_channel) for part in range(number)]


def _interleaved() -> dict[str, tuple[Source, ...]]:
    """Sources of Qwen3-Next's mixer."""
    query, key, value, gate = _stacked("in_proj_qkvz", Stack.KEY_HEADS, 4)
    strength, step = _stacked("in_proj_ba", Stack.CONTROLS, 2)
    query_taps, key_taps, taps = _stacked("conv1d", Stack.DELTA_CHANNELS, 3)
    return {
        "attention.inputs.gate": (gate,),
        "attention.inputs.value": (value,),
        "attention.inputs.query_key": (query, key),
        "attention.inputs.step": (step,),
        "attention.inputs.strength": (strength,),
        "attention.convolution": (taps,),
        "attention.query_key_convolution": (query_taps, key_taps),
        **_of_both("norm", "out_proj"),
    }


def _separate() -> dict[str, tuple[Source, ...]]:
    """Sources of OLMo hybrid's mixer."""
    query_taps, key_taps, taps = (Source(f"{_MODULE}.{part}_conv1d", has_channel=True) for part in "qkv")
    letters = {"gate": "g", "value": "v", "step": "a", "strength": "b"}
    return {
        **{f"attention.inputs.{name}": (Source(f"{_MODULE}.{letter}_proj"),) for name, letter in letters.items()},
        "attention.inputs.query_key": (Source(f"{_MODULE}.q_proj"), Source(f"{_MODULE}.k_proj")),
        "attention.convolution": (taps,),
        "attention.query_key_convolution": (query_taps, key_taps),
        **_of_both("o_norm", "o_proj"),
    }


_QUERY_GATE = tuple(Source("self_attn.q_proj", part, stack=Stack.QUERY_GATE) for part in range(2))
QWEN3_NEXT = replace(
    LLAMA,
    block={**LLAMA.block, "attention.qkv.query": _QUERY_GATE},
    kinds={"gated_delta": _interleaved(), "experts": QWEN_SHARED},
    buffers=rf"{LLAMA.buffers}|mtp\..+",
)
"""Published files also hold layers that predict further tokens (`mtp.`), which `transformers` ignores, too."""
_NORMS = ("attention_layer_norm", "feedforward_layer_norm")
OLMO_HYBRID: TensorNames = replace(
    OLMO2,
    kinds={
        "gated_delta": {
            **_separate(),
            **{module: (Source(name),) for module, name in zip(("attention_norm", "mlp_norm"), _NORMS, strict=True)},
        }
    },
    second_names={
        "gated_delta": dict(zip(("input_layernorm", "post_attention_layernorm"), _NORMS, strict=True)),
        "attention": {"feedforward_layer_norm": "post_attention_layernorm"},
    },
    joined=(f"{_MODULE}.conv1d.weight", tuple(f"{_MODULE}.{part}_conv1d.weight" for part in "qkv")),
)
"""Names in the released files. In memory, `transformers` joins the taps and has its own names of the norms. It writes
the taps in three tensors of equal sizes, and gives the norms of attention the released name of another norm."""
