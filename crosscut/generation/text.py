"""From a prompt to a text, with a model in memory or with a run's newest checkpoint."""

import dataclasses
from pathlib import Path

import click

from crosscut.checkpoint import Folder, latest_good_checkpoint, load_model, require_identity
from crosscut.config import ConfigError, RunConfig, load_run
from crosscut.config.conventions import CHECKPOINTS_FOLDER, CONFIG_FILE
from crosscut.data import TokenFolder
from crosscut.generation.sampling import Sampling, sample
from crosscut.model import GPT
from crosscut.parallel import RandomStreams, launch, make_mesh, process_group
from crosscut.parallel.processes import choose_device, require_devices


def continue_text(model: GPT, tokens: TokenFolder, prompt: str, sampling: Sampling) -> str:
    """The prompt and what the model makes of it; every rank calls it. An empty prompt starts at an end of text."""
    tokenizer = tokens.tokenizer()
    ids = tokenizer.encode(prompt) if prompt else []
    new = sample(model, ids or [tokens.end_of_text], sampling, stop=tokens.end_of_text)
    return tokenizer.decode([*ids, *new]).strip()


def generate_text(folder: Path, prompt: str, sampling: Sampling, *, tensor: int, device: str) -> None:
    """Print a text by the newest checkpoint of the run in `folder`, cut over `tensor` ranks, whatever trained it.

    Raises `ConfigError`, `LayoutError`, `DataError` or `CheckpointError`.
    """
    if not (folder / CONFIG_FILE).is_file():
        raise ConfigError(f"`{folder}` must be the folder of a run, but has no `{CONFIG_FILE}`. Train one first.")
    layout = [f"layout.tensor={tensor}", "layout.data=1", "layout.sequence_parallel=false"]
    layout += ["layout.sharding=none", "layout.shard_group=0", "layout.symmetric_memory=false"]
    run = load_run(folder / CONFIG_FILE, [*layout, f"training.device={device}"])
    require_devices(device, tensor)
    checkpoint = latest_good_checkpoint(_checkpoints(run, folder)).folder
    sizes = {f"model.{name}": value for name, value in dataclasses.asdict(run.model).items() if name != "dropout"}
    require_identity(checkpoint, sizes)
    TokenFolder.open(Path(run.tokens_folder), verify=False)
    launch(_generate_rank, (run, checkpoint, prompt, sampling), num_ranks=tensor)


def _checkpoints(run: RunConfig, folder: Path) -> str:
    """Where the run keeps them; a run's folder may have been moved since."""
    return run.checkpoint.folder or str(folder / CHECKPOINTS_FOLDER)


def _generate_rank(run: RunConfig, checkpoint: Folder, prompt: str, sampling: Sampling) -> None:
    device = choose_device(run.training.device)
    with process_group(device):
        mesh = make_mesh(run.layout, device)
        model = GPT(run.model, mesh=mesh, streams=RandomStreams(mesh, sampling.seed))
        load_model(checkpoint, model=model, padded=model.padded_rows)
        text = continue_text(model, TokenFolder.open(Path(run.tokens_folder), verify=False), prompt, sampling)
        if mesh.is_first_rank:
            click.echo(text)
