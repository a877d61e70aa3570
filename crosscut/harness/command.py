"""lm-eval's own command line, extended by the model `crosscut`. The command starts the ranks that this model needs."""

import os
import sys
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from crosscut.harness.arguments import MODEL, ModelArguments, refuse_cache, refuse_chat_template
from crosscut.harness.tasks import require_installed
from crosscut.launch import in_ranks
from crosscut.launch.processes import is_first_started, was_started

if TYPE_CHECKING:
    from lm_eval.config.evaluate_config import EvaluatorConfig


def run_command(arguments: Sequence[str]) -> None:
    """Run `lm-eval ARGUMENTS`. With `--model crosscut`, start the ranks that `--model_args` asks for, or join the ranks
    that torchrun started.

    If lm-eval is not installed, or an option is not supported for Crosscut models, raises `ConfigError` or
    `LayoutError` before any rank starts. Errors of lm-eval itself are passed on.
    """
    require_installed("`crosscut lm-eval`")
    model = _model_of(arguments)
    if model is None:
        _do(arguments)
    else:
        if was_started():
            model.require_ranks()
        in_ranks(model.on.ranks(), _do_on_rank, prepare=lambda: list(arguments), is_plain=True)


def _model_of(arguments: Sequence[str]) -> ModelArguments | None:
    """Return the Crosscut model that the arguments name, or None if the arguments name another model or none."""
    asked = _asked(arguments)
    if asked is None or asked.model != MODEL:
        return None
    options = {name: getattr(asked, name) for name in ("batch_size", "max_batch_size", "device")}
    model = ModelArguments.of(asked.model_args, options)
    if asked.apply_chat_template:
        refuse_chat_template()
    if asked.use_cache and model.on.layout.world_size > 1:
        refuse_cache()
    return model


def _asked(arguments: Sequence[str]) -> "EvaluatorConfig | None":
    """Parse the arguments as lm-eval does, including the file that `--config` names. Return None if there is nothing to
    run.
    """
    from lm_eval._cli import HarnessCLI
    from lm_eval.config.evaluate_config import EvaluatorConfig

    sys.argv = ["lm-eval", *arguments]
    parsed = HarnessCLI().parse_args()
    if parsed.command != "run":
        return None
    with Path(os.devnull).open("w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
        return EvaluatorConfig.from_cli(parsed)  # lm-eval prints these messages again later


def _do_on_rank(arguments: Sequence[str], _device: torch.device) -> None:
    """Run lm-eval on one rank. Only the first rank prints anything."""
    if is_first_started():
        _do(arguments)
    else:
        with Path(os.devnull).open("w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
            _do(arguments)


def _do(arguments: Sequence[str]) -> None:
    from lm_eval.__main__ import cli_evaluate

    import crosscut.harness.adapter  # noqa: F401 - lm-eval before its plugin system finds only imported models

    sys.argv = ["lm-eval", *arguments]
    cli_evaluate()
