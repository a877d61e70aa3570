"""Gradients of a small model of transformers, uncut and cut by its own `tp_plan` over two CPU ranks, in float64.

    torchrun --nproc_per_node 2 gradients.py apertus
    torchrun --nproc_per_node 2 gradients.py apertus "model.layers.*.mlp.act_fn=replicated_with_grad_allreduce"

Further rules, as in the second line, are added to the plan. The program needs only torch and transformers. It prints
every parameter that was loaded wrong, the loss of both models, and every parameter whose gradient differs. It exits
with status 1 if one does.
"""

import sys
import tempfile

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.distributed import DistributedConfig

SIZES = {"vocab_size": 48, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
SPECIAL = {"num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def main(kind: str, *rules: str) -> bool:
    """Compare the two models, the second of which is cut with further rules. Returns whether a gradient differs."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **SIZES, **SPECIAL)
    uncut = AutoModelForCausalLM.from_config(config, attn_implementation="eager").double()
    tokens = torch.randint(4, 48, (2, 8))
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    if dist.get_rank() == 0:
        uncut.save_pretrained(folder[0])
    dist.barrier()
    plan = dict(rule.split("=") for rule in rules)
    distributed = DistributedConfig(tp_size=dist.get_world_size(), tp_plan=plan or None)
    cut = AutoModelForCausalLM.from_pretrained(
        folder[0], distributed_config=distributed, dtype=torch.float64, attn_implementation="eager"
    )
    for name, parameter in cut.named_parameters():
        whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        if not torch.allclose(whole, uncut.get_parameter(name), rtol=1e-6):
            say(f"{name}: the loaded values are not those of the file")
    losses = []
    for model in (uncut, cut):
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        losses.append(loss.item())
    say(f"loss: {losses[0]:.15f} uncut, {losses[1]:.15f} cut")
    wrong = [name for name, parameter in uncut.named_parameters() if differs(name, parameter, cut.get_parameter(name))]
    dist.destroy_process_group()
    return bool(wrong)


def differs(name: str, uncut: torch.nn.Parameter, cut: torch.nn.Parameter) -> bool:
    """Whether a gradient differs, which is printed."""
    if uncut.grad is None or cut.grad is None:
        return uncut.grad is not cut.grad
    gradient = cut.grad.full_tensor() if isinstance(cut.grad, DTensor) else cut.grad
    own = [torch.empty_like(gradient) for _ in range(dist.get_world_size())]
    dist.all_gather(own, gradient.contiguous())
    far = max((each - uncut.grad).abs().max().item() for each in own) / uncut.grad.abs().max().item()
    total = (sum(own) - uncut.grad).abs().max().item() / uncut.grad.abs().max().item()
    if far > 1e-6:  # rounding of parts that the model computes in float32
        say(f"{name}: {far:.1e} relative difference; {total:.1e} if the ranks' gradients are summed")
    return far > 1e-6


def say(text: str) -> None:
    """Print a line once."""
    if dist.get_rank() == 0:
        print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
