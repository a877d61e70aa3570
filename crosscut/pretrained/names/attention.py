"""Names of the tensors of families whose layers are attention and an MLP."""

from dataclasses import replace

from crosscut.pretrained.names.source import OUTPUT, Source, TensorNames

GPT2 = TensorNames(
    prefix="transformer.",
    layer="h.{}.",
    root={"tokens": Source("wte"), "positions": Source("wpe"), "final_norm": Source("ln_f"), "output": OUTPUT},
    block={
        "attention_norm": (Source("ln_1"),),
        "attention.qkv.query": (Source("attn.c_attn", 0, transposed=True),),
        "attention.qkv.key_value": tuple(Source("attn.c_attn", part, transposed=True) for part in (1, 2)),
        "attention.output": (Source("attn.c_proj", transposed=True),),
        "mlp_norm": (Source("ln_2"),),
        "mlp.expand": (Source("mlp.c_fc", transposed=True),),
        "mlp.contract": (Source("mlp.c_proj", transposed=True),),
    },
    buffers=r"transformer\.h\.\d+\.attn\.(bias|masked_bias)",
)
BIGCODE = replace(
    GPT2,
    block={module: tuple(replace(one, transposed=False) for one in sources) for module, sources in GPT2.block.items()},
)
LLAMA = TensorNames(
    prefix="model.",
    layer="layers.{}.",
    root={"tokens": Source("embed_tokens"), "final_norm": Source("norm"), "output": OUTPUT},
    block={
        "attention_norm": (Source("input_layernorm"),),
        "attention.qkv.query": (Source("self_attn.q_proj"),),
        "attention.qkv.key_value": (Source("self_attn.k_proj"), Source("self_attn.v_proj")),
        "attention.query_norm": (Source("self_attn.q_norm"),),
        "attention.key_norm": (Source("self_attn.k_norm"),),
        "attention.output": (Source("self_attn.o_proj"),),
        "mlp_norm": (Source("post_attention_layernorm"),),
        "mlp.expand.gate": (Source("mlp.gate_proj"),),
        "mlp.expand.up": (Source("mlp.up_proj"),),
        "mlp.contract": (Source("mlp.down_proj"),),
    },
    buffers=r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq",
)
OLMO2 = replace(
    LLAMA,
    block={
        **LLAMA.block,
        "attention_norm": (Source("post_attention_layernorm"),),
        "mlp_norm": (Source("post_feedforward_layernorm"),),
    },
)
STARCODER2 = replace(
    LLAMA,
    block={
        **{module: sources for module, sources in LLAMA.block.items() if not module.startswith("mlp.")},
        "mlp.expand": (Source("mlp.c_fc"),),
        "mlp.contract": (Source("mlp.c_proj"),),
    },
)
ARCEE = replace(
    LLAMA,
    block={
        **STARCODER2.block,
        "mlp.expand": (Source("mlp.up_proj"),),
        "mlp.contract": (Source("mlp.down_proj"),),
    },
)
NANOCHAT = replace(
    ARCEE,
    block={
        **ARCEE.block,
        "attention.qkv.query": (Source("self_attn.q_proj", swaps_halves=True),),
        "attention.qkv.key_value": (Source("self_attn.k_proj", swaps_halves=True), Source("self_attn.v_proj")),
        "mlp.expand": (Source("mlp.fc1"),),
        "mlp.contract": (Source("mlp.fc2"),),
    },
)
BERT = TensorNames(
    prefix="",
    layer="encoder.layer.{}.",
    root={
        "tokens": Source("embeddings.word_embeddings"),
        "positions": Source("embeddings.position_embeddings"),
        "token_types": Source("embeddings.token_type_embeddings"),
        "embedding_norm": Source("embeddings.LayerNorm"),
    },
    block={
        "attention.qkv.query": (Source("attention.self.query"),),
        "attention.qkv.key_value": (Source("attention.self.key"), Source("attention.self.value")),
        "attention.output": (Source("attention.output.dense"),),
        "attention_norm": (Source("attention.output.LayerNorm"),),
        "mlp.expand": (Source("intermediate.dense"),),
        "mlp.contract": (Source("output.dense"),),
        "mlp_norm": (Source("output.LayerNorm"),),
    },
    buffers=r"(bert\.)?embeddings\.(position_ids|token_type_ids)|cls\.predictions\.decoder\.(weight|bias)",
    optional_prefix=r"^(bert|roberta)\.",
    heads=r"(bert\.)?(pooler|cls|lm_head|classifier|qa_outputs)\..+",
)
BERT_WITH_HEADS = replace(
    BERT,
    prefix="bert.",
    root={
        **BERT.root,
        "prediction": Source("cls.predictions"),
        "prediction.dense": Source("cls.predictions.transform.dense"),
        "prediction.norm": Source("cls.predictions.transform.LayerNorm"),
        "order.pooler": Source("pooler.dense"),
        "order.classifier": Source("cls.seq_relationship"),
    },
)
