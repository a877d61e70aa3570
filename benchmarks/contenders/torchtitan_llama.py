"""The Llama of torchtitan 0.3, trained on one device with the parts of torchtitan's own trainer.

The settings are torchtitan's defaults on one GPU, except for recomputation:

- `fully_shard` over one rank keeps weights in float32 and makes their copies in bfloat16;
- the loss runs in eight chunks, attention is flex attention inside documents, AdamW is fused;
- forward and backward pass run as one CUDA graph;
- a compiled contender compiles each layer separately, and the loss;
- nothing is recomputed: torchtitan recomputes by default, which is slower, and no other contender does so.

On a CPU, flex attention has no backward pass, so attention is PyTorch's own, and there is no CUDA graph.

Shapes: B batch, S sequence.
"""

from collections.abc import Callable, Sequence
from functools import partial
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.contenders.task import NotActiveError, Shape, Way

VERSION = "0.3."
"""Beginning of the versions whose parts fit together as this file does."""


class TorchtitanStep:
    """A training step of torchtitan. A process group of one rank must exist already.

    Raises `NotActiveError` if another version is installed.
    """

    def __init__(self, shape: Shape, way: Way) -> None:
        if not (found := version("torchtitan")).startswith(VERSION):
            raise NotActiveError(f"torchtitan must be {VERSION}x, but is {found}")
        _take_device(way.device)
        torch.autograd.set_multithreading_enabled(False)  # as its trainer does
        from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
        from torchtitan.components.optimizer import default_adamw
        from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
        from torchtitan.distributed import ParallelDims
        from torchtitan.distributed.cudagraph import wrap_with_cuda_graph
        from torchtitan.distributed.utils import get_spmd_context
        from torchtitan.models.llama3 import parallelize_llama

        parallelism, compile_config = ParallelismConfig(), CompileConfig(enable=way.compiled)
        ranks = ParallelDims.from_config(parallelism, 1)
        with torch.device("meta"):
            model = make_config(shape, way).build()
        model = parallelize_llama(
            model, parallel_dims=ranks, training=TrainingConfig(mixed_precision_param=way.precision),
            parallelism=parallelism, compile_config=compile_config, ac_config=None, dump_folder="",
        )  # fmt: skip
        model.to_empty(device=way.device)
        with torch.no_grad():
            model.init_weights(buffer_device=None)
        self.model = model.train()
        chunks = ChunkedLossWrapper.Config(loss_fn=CrossEntropyLoss.Config(global_vocab_size=shape.vocab_size))
        self.loss = chunks.build(compile_config=compile_config)
        self.loss.set_lm_head(model.lm_head)
        model._skip_lm_head = True  # the loss applies the head, chunk by chunk
        self.optimizer = default_adamw(lr=1e-4, weight_decay=0.01).build(model_parts=[model])
        self.mesh_context = get_spmd_context(parallel_dims=ranks)
        self.has_masks = _uses_flex_attention(way)
        self.forward_and_backward: Callable[..., Tensor] = wrap_with_cuda_graph(self._forward_and_backward)

    def __call__(self, _number: int, micro_batches: Sequence[tuple[Tensor, Tensor]]) -> Callable[[], float]:
        """Do a step, as `Step` defines it."""
        from torchtitan.distributed.utils import clip_grad_norm_

        self.optimizer.zero_grad(set_to_none=False)  # a CUDA graph writes to the same memory every time
        num_targets = sum(targets.numel() for _, targets in micro_batches)
        tokens_of_step = torch.full((), num_targets, device=micro_batches[0][1].device)
        total: Tensor | None = None
        for tokens, targets in micro_batches:
            positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens).contiguous()
            places: dict[str, Any] = {"positions": positions}
            if self.has_masks:
                places["attention_masks"] = self.model.get_attention_masks(positions=positions)
            # A CUDA graph keeps its first inputs and copies all later inputs into them, so it gets copies.
            loss = self.forward_and_backward(tokens.clone(), targets.clone(), tokens_of_step, places).detach()
            total = loss.clone() if total is None else total.add_(loss)
        assert total is not None
        clip_grad_norm_(list(self.model.parameters()), 1.0, foreach=True)
        self.optimizer.step()
        return total.item

    def _forward_and_backward(
        self, tokens: Tensor, targets: Tensor, tokens_of_step: Tensor, places: dict[str, Any]
    ) -> Tensor:
        """Share of a micro-batch in the mean loss of the step; tokens and targets are [B, S]."""
        with self.mesh_context():
            hidden = self.model(tokens, **places)  # [B, S, H], because of `_skip_lm_head`
            loss, _ = self.loss(hidden, targets, tokens_of_step, positions=places["positions"])
            del hidden
            loss.backward()
        return loss


def make_config(shape: Shape, way: Way) -> Any:
    """Config of a `Llama3Model` with tied embeddings and as many key and value heads as query heads."""
    from torchtitan.models.common import ComplexRoPE, Embedding, Linear, RMSNorm
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.models.common.config_utils import get_attention_config, make_ffn_config, make_gqa_config
    from torchtitan.models.common.param_init import skip_param_init
    from torchtitan.models.llama3.model import Llama3Model, Llama3TransformerBlock
    from torchtitan.models.llama3.sharding import set_llama3_sharding_config

    size, heads = shape.hidden_size, shape.num_heads
    initial: dict[str, Callable[..., Any]] = {"weight": partial(nn.init.normal_, std=0.02)}

    def norm() -> Any:
        return RMSNorm.Config(normalized_shape=size, param_init={"weight": nn.init.ones_})

    def layer() -> Any:
        attention = get_attention_config("flex") if _uses_flex_attention(way) else ScaledDotProductAttention.Config()
        rotation = ComplexRoPE.Config(dim=size // heads, max_seq_len=shape.sequence_length, theta=10_000.0)
        return Llama3TransformerBlock.Config(
            attention_norm=norm(), ffn_norm=norm(),
            attention=make_gqa_config(
                dim=size, n_heads=heads, wqkv_param_init=initial, wo_param_init=initial, inner_attention=attention,
                rope=rotation, fuse_qkv=True,
            ),
            feed_forward=make_ffn_config(
                dim=size, hidden_dim=shape.mlp_size, w1_param_init=initial, w2w3_param_init=initial
            ),
        )  # fmt: skip

    config = Llama3Model.Config(
        dim=size,
        vocab_size=shape.vocab_size,
        enable_weight_tying=True,
        tok_embeddings=Embedding.Config(
            num_embeddings=shape.vocab_size, embedding_dim=size, param_init={"weight": skip_param_init}
        ),
        norm=norm(),
        lm_head=Linear.Config(in_features=size, out_features=shape.vocab_size, param_init=initial),
        layers=[layer() for _ in range(shape.num_layers)],
    )
    set_llama3_sharding_config(config, enable_sp=True)
    return config


def _uses_flex_attention(way: Way) -> bool:
    return way.device == "cuda"


def _take_device(device: str) -> None:
    """Make torchtitan use this device: without an accelerator it would assume CUDA."""
    from torchtitan.tools import utils

    utils.device_type, utils.device_module = device, torch.get_device_module(device)
