"""Names of the tensors of families with latent attention."""

from dataclasses import replace

from crosscut.config.parts.latent_attention import LatentAttentionConfig
from crosscut.pretrained.names.attention import LLAMA
from crosscut.pretrained.names.experts import experts_in, with_bias
from crosscut.pretrained.names.source import Source, TensorNames

_EXPERTS = experts_in("mlp", shared="shared_experts")


def deepseek(sizes: LatentAttentionConfig) -> TensorNames:
    """Names of DeepSeek's tensors. One tensor stacks the projections to the latent of keys and values, and to the part
    of the keys that all heads share.
    """
    rank, rope = sizes.key_value_rank, sizes.rope_size
    down = Source("self_attn.kv_a_proj_with_mqa", num_rows=sizes.kept_size)
    query = Source("self_attn.q_b_proj" if sizes.query_rank else "self_attn.q_proj", group=sizes.head_size, paired=rope)
    others = {name: one for name, one in LLAMA.block.items() if not name.startswith("attention.")}
    block = {
        **others,
        "attention.down.query": (Source("self_attn.q_a_proj"),),
        "attention.query_norm": (Source("self_attn.q_a_layernorm"),),
        "attention.query": (query,),
        "attention.down.latent": (down,),
        "attention.down.key": (replace(down, start=rank, group=rope, paired=rope),),
        "attention.latent_norm": (Source("self_attn.kv_a_layernorm"),),
        "attention.key_value": (Source("self_attn.kv_b_proj"),),
        "attention.output": (Source("self_attn.o_proj"),),
    }
    return replace(LLAMA, block=block, kinds={"experts": with_bias(_EXPERTS, "mlp.gate")}, further="eh_proj.weight")
