"""A small state to save: two linear layers and their optimizer."""

from pathlib import Path

import torch
from torch import nn

from crosscut.checkpoint import Folder, Progress, Saver
from crosscut.config import CheckpointConfig

SIZE = 64


def small_state(seed: int = 0, size: int = SIZE) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Two layers after one step of AdamW."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(size, size), nn.Linear(size, size))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    step(model, optimizer)
    return model, optimizer


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(1, model[0].in_features)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def progress_at(number: int) -> Progress:
    return Progress(step=number, samples=4 * number, layout="tensor 1 x data 1", seed=7, identity={"model.size": SIZE})


def save_steps(root: Path | str | Folder, steps: list[int], **settings: object) -> None:
    """Save checkpoints at these steps with one saver."""
    model, optimizer = small_state()
    config = CheckpointConfig(**{"keep": 100, **settings})
    with Saver(root, model=model, optimizer=optimizer, config=config, is_first_rank=True) as saver:
        for number in steps:
            step(model, optimizer)
            saver.save(progress_at(number))
        saver.finish()
