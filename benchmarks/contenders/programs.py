"""The programs that the benchmarks compare: Crosscut, and its peers as their own users run them.

`make_step` builds one program and returns the function that does a training step: forward and backward over the
micro-batches, clipping at a norm of 1.0, AdamW in PyTorch's fused form. All programs have the same sizes, tied
embeddings and no dropout. In bfloat16 the peers run under autocast with weights in float32, as Crosscut does.
"""

import importlib.util
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from benchmarks.contenders.task import MASKED, NotActiveError, Shape, Step, Way


class CrosscutStep:
    """A training step of Crosscut. The process group must exist already and may have any size (see `crosscut_run`)."""

    def __init__(self, shape: Shape, way: Way) -> None:
        import torch

        from benchmarks.training.ranks import trainer_of

        self.shape = shape
        device = torch.device(way.device, 0) if way.device == "cuda" else torch.device(way.device)
        self.trainer = trainer_of(crosscut_run(shape, way), device)

    def __call__(self, number: int, micro_batches: Sequence[tuple[Any, Any]]) -> Callable[[], float]:
        """Do a step, as `Step` defines it."""
        result = self.trainer.step(number, [batch_of(self.shape, *micro_batch) for micro_batch in micro_batches])
        return lambda: result.loss  # reading the loss waits for the device

    def compiled_gradients_off(self, micro_batch: tuple[Any, Any]) -> tuple[float, str]:
        """Largest relative difference between a compiled and an uncompiled gradient, and the name of its parameter.

        Differences are norms relative to the norm of the uncompiled gradient, or to a thousandth of the largest norm
        if that is more.
        """
        from crosscut.training.speed.compilation import uncompiled

        model = self.trainer.model

        def gradients() -> dict[str, Any]:
            self.trainer.accumulate(0, [batch_of(self.shape, *micro_batch)])
            found = {name: parameter.grad.to_local() for name, parameter in model.named_parameters()}
            self.trainer.optimizer.zero_grad()
            return found

        compiled = gradients()
        with uncompiled(model):
            plain = gradients()
        sizes = {name: gradient.norm().item() for name, gradient in plain.items()}
        least = max(sizes.values()) / 1000
        off = {name: (compiled[name] - plain[name]).norm().item() / max(sizes[name], least) for name in plain}
        return max((share if math.isfinite(share) else math.inf, name) for name, share in off.items())


def batch_of(shape: Shape, tokens: Any, targets: Any) -> Any:
    """Make Crosscut's batch from (tokens, targets)."""
    from crosscut.model import Batch

    if shape.num_classes:
        return Batch(tokens=tokens, labels=targets)
    batch = Batch(tokens=tokens, targets=targets)
    return batch.with_predicted(MASKED) if shape.family == "BERT" else batch


LLAMA = {"positions": "rotary", "norm": "rms", "layers": ("attention swiglu",), "biases": "none"}
"""Settings that make Crosscut's model a Llama."""

BERT = {"attention": "bidirectional", "norm_place": "after", "token_types": 2, "layers": ("attention gelu_exact",)}
"""Settings that make Crosscut's model a BERT, without a head."""


def crosscut_run(shape: Shape, way: Way) -> Any:
    """Build the `RunConfig`. The batch of the shape is the batch of one data rank."""
    from crosscut.config import load_run

    experts = {"number": shape.num_experts, "per_token": shape.experts_per_token, "size": shape.mlp_size}
    mixture = {**LLAMA, "layers": ("attention experts",), "experts": experts}
    head = {"head": "classes", "num_classes": shape.num_classes} if shape.num_classes else {"head": "masked_tokens"}
    family = {"GPT-2": {}, "Llama": LLAMA, "BERT": {**BERT, **head}, "Mixtral": mixture}[shape.family]
    length = shape.sequence_length
    table = {
        "model": {**shape.sizes, "max_sequence_length": length, "dropout": 0.0, "mlp_size": shape.mlp_size, **family},
        "training": {
            "batch_size": shape.batch_size, "sequence_length": length, "precision": way.precision,
            "compile": "on" if way.compiled else "off", "steps": 1000,
        },
        "data": {"objective": "masked"} if family.get("head") == "masked_tokens" else {},
        "optimizer": {"warmup_steps": 100},
    }  # fmt: skip
    return load_run(table, way.overrides)


def make_transformers(shape: Shape, way: Way) -> Step:
    """Hugging Face's GPT-2, BERT or Mixtral with its own attention and loss."""
    from transformers import GPT2LMHeadModel, MixtralForCausalLM

    from benchmarks.contenders.sublayers import mixtral_config

    if shape.family == "BERT":
        from benchmarks.contenders.transformers_bert import make_bert

        return make_bert(shape, way)

    with _on(way):
        if shape.family == "Mixtral":
            model = MixtralForCausalLM(mixtral_config(shape)).train()
        else:
            model = GPT2LMHeadModel(_gpt2_config(shape)).train()
    called = _compiled(model, way)

    def loss(tokens: Any, _targets: Any) -> Any:
        return called(input_ids=tokens, labels=tokens).loss  # it shifts the labels itself

    return step_of(model, loss, way)


def _gpt2_config(shape: Shape) -> Any:
    from transformers import GPT2Config

    return GPT2Config(
        n_layer=shape.num_layers, n_embd=shape.hidden_size, n_head=shape.num_heads, vocab_size=shape.vocab_size,
        n_positions=shape.sequence_length, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False,
        attn_implementation="sdpa",
    )  # fmt: skip


def make_litgpt(shape: Shape, way: Way) -> Step:
    """Litgpt's GPT in the same sizes, its embeddings tied like GPT-2's, with its chunked loss.

    It has rotary positions instead of learned ones, a difference of 0.1% of the parameters.
    """
    from litgpt import GPT, Config
    from litgpt.utils import chunked_cross_entropy

    config = Config(
        n_layer=shape.num_layers, n_embd=shape.hidden_size, n_head=shape.num_heads, block_size=shape.sequence_length,
        vocab_size=shape.vocab_size, padded_vocab_size=shape.vocab_size, bias=True, parallel_residual=False,
        norm_class_name="LayerNorm", mlp_class_name="GptNeoxMLP", gelu_approximate="tanh", rotary_percentage=0.25,
    )  # fmt: skip
    with _on(way):
        model = GPT(config).train()
    model.lm_head.weight = model.transformer.wte.weight
    called = _compiled(model, way)

    def loss(tokens: Any, targets: Any) -> Any:
        return chunked_cross_entropy(called(tokens), targets)

    return step_of(model, loss, way)


def make_plain(shape: Shape, way: Way) -> Step:
    """The plain PyTorch program in `plain_gpt.py`."""
    from benchmarks.contenders.plain_gpt import PlainGPT

    with _on(way):
        sizes = {**shape.sizes, "sequence_length": shape.sequence_length}
        model = PlainGPT(**sizes, loss_chunk_tokens=way.loss_chunk_tokens)
    return step_of(model, _compiled(model, way), way)


PROGRAMS: dict[str, Callable[[Shape, Way], Step]] = {
    "crosscut": CrosscutStep,
    "transformers": make_transformers,
    "litgpt": make_litgpt,
    "plain": make_plain,
}

PEERS_OF = {"GPT-2": ("transformers", "litgpt", "plain"), "Llama": (),
            **dict.fromkeys(("BERT", "Mamba-2", "Mixtral", "Qwen3-MoE"), ("transformers",))}  # fmt: skip
"""Peers that train a model of a family."""


def is_installed(program: str) -> bool:
    """Whether the package of a contender is installed."""
    return program in ("crosscut", "plain") or importlib.util.find_spec(program) is not None


def make_step(program: str, shape: Shape, way: Way) -> Step:
    """Build the training step of a program.

    Only this program's packages are imported, so a process does not pay for the others. Raises `NotActiveError` if the
    program has no model of the shape's family.
    """
    if program != "crosscut" and program not in PEERS_OF[shape.family]:
        raise NotActiveError(f"{program} must train a {shape.family}, but this benchmark has none for it")
    if shape.is_sublayer:
        from benchmarks.contenders.sublayers import make_sublayer

        return make_sublayer(program, shape)
    return PROGRAMS[program](shape, way)


def require_compiled() -> None:
    """Raise `NotActiveError` unless this process has compiled something. Call it after the first step."""
    from torch._dynamo.utils import counters

    if not counters["stats"]["unique_graphs"]:
        raise NotActiveError("the model must be compiled, but nothing was compiled")


def _on(way: Way) -> AbstractContextManager[Any]:
    """Context in which modules are built on the device of the contender."""
    import torch

    return torch.device(way.device)


def _compiled(model: Any, way: Way) -> Any:
    import torch

    return torch.compile(model) if way.compiled else model


def step_of(model: Any, compute_loss: Callable[[Any, Any], Any], way: Way) -> Step:
    """The training step that a user writes around a plain PyTorch model."""
    import torch

    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=1e-4, weight_decay=0.01, fused=True)

    def precision() -> AbstractContextManager[Any]:
        return (
            torch.autocast(way.device, getattr(torch, way.precision)) if way.precision != "float32" else nullcontext()
        )

    def step(_number: int, micro_batches: Sequence[tuple[Any, Any]]) -> Callable[[], float]:
        total = torch.zeros((), device=way.device)
        for tokens, targets in micro_batches:
            with precision():
                loss = compute_loss(tokens, targets) / len(micro_batches)
            loss.backward()
            total = total + loss.detach()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return total.item

    return step
