"""Sampling a continuation token by token.

Every rank computes the same logits and draws from the same stream, so the ranks agree without sending their choice;
those that share one copy of the model make sure.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from crosscut.config import ConfigError
from crosscut.model import GPT
from crosscut.parallel import ParallelMesh, reshard, seed_of
from crosscut.parallel.collectives import all_reduce


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the next token is chosen."""

    num_tokens: int = 200
    """Longest continuation."""
    temperature: float = 0.8
    """Spread of the choices; 0 takes the likeliest."""
    top_k: int = 50
    """Choose among this many likeliest tokens."""
    seed: int = 0

    def __post_init__(self) -> None:
        for name, minimum in (("num_tokens", 0), ("temperature", 0), ("top_k", 1)):
            if not getattr(self, name) >= minimum:
                raise ConfigError(f"`{name}` must be at least {minimum}, but is {getattr(self, name)}.")


@torch.no_grad()
def sample(model: GPT, prompt: Sequence[int], sampling: Sampling, *, stop: int | None = None) -> list[int]:
    """Continue a prompt of at least one token id; gives the new ids only, the same on every rank.

    Ends early at the id `stop`, which is not given. The context is the last tokens that the model's positions allow.
    """
    was_training = model.training
    model.eval()
    generator = torch.Generator().manual_seed(seed_of("sample", sampling.seed))
    tokens = list(prompt)
    try:
        for _ in range(sampling.num_tokens):
            context = torch.tensor([tokens[-model.config.max_sequence_length :]], device=model.mesh.device)
            choice = _agreed(_draw(model.logits(context)[0].float().cpu(), sampling, generator), model.mesh)
            if choice == stop:
                break
            tokens.append(choice)
    finally:
        reshard(model)
        model.train(was_training)
    return tokens[len(prompt) :]


def _agreed(choice: int, mesh: ParallelMesh) -> int:
    """One choice for all ranks that gather layers together: devices of other kinds may round a close call otherwise."""
    if mesh.sharding is None:
        return choice
    return int(all_reduce(torch.tensor(choice, device=mesh.device), mesh.data, "max"))


def _draw(logits: Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    if sampling.temperature == 0:
        return int(logits.argmax())
    values, indices = logits.topk(min(sampling.top_k, logits.numel()))
    chances = torch.softmax(values / sampling.temperature, 0)
    return int(indices[torch.multinomial(chances, 1, generator=generator)])
