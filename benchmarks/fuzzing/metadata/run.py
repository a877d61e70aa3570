"""Run cases of the kind `metadata`: compare a folder with one edited key with `transformers` and PEFT.

Each case must be computed as the reference computes it, or be refused, or a line must name the key. The cases run in
the process of the pool, because one comparison takes 20 ms.
"""

import os
import shutil
import tempfile
import time
import traceback
from functools import cache
from pathlib import Path

import torch

from benchmarks.fuzzing.cases import Case
from benchmarks.fuzzing.findings import Finding
from benchmarks.fuzzing.metadata.compare import compare, silent
from benchmarks.fuzzing.metadata.folders import copied, draw, make_models
from benchmarks.fuzzing.sandbox import Outcome
from crosscut.config import Layout
from crosscut.launch import process_group
from crosscut.parallel import make_mesh

METADATA = "metadata"
"""Name of the kind."""


def cases(count: int, seed: int, scratch: Path) -> list[Case]:
    """The first cases of a seed."""
    models = _models(scratch)
    return [Case(METADATA, number, str(draw(models, seed, number)), ()) for number in range(count)]


def run_one(case: Case, seed: int, scratch: Path) -> tuple[list[Finding], Outcome]:
    """Build and compare the folder of a case."""
    models, start = _models(scratch), time.monotonic()
    edit = draw(models, seed, case.number)
    outcome, place = Outcome(status=0), f"{edit.file}: {'.'.join(edit.path)}"
    failure = detail = ""
    cpu = torch.device("cpu")
    with tempfile.TemporaryDirectory(dir=scratch) as folder:
        built = copied(models, edit, Path(folder) / "model")
        try:
            with process_group(cpu):
                verdict = compare(built, edit, make_mesh(Layout(), cpu))
        except Exception as error:
            failure, detail = "traceback", f"{type(error).__name__}: {error}"[:300]
            outcome.trace = traceback.format_exc()
        else:
            outcome.output = f"{verdict.result}: {verdict.detail}".encode()
            if verdict.result == "different":
                failure, detail = "accepted", verdict.detail
    outcome.seconds = outcome.processor = time.monotonic() - start
    if not failure:
        return [], outcome
    reproduction = f"python benchmarks/fuzz.py --replay {seed}/{METADATA}/{case.number}"
    finding = Finding(kind=METADATA, failure=failure, place=place, detail=f"{edit}: {detail}", case=case, seed=seed,
                      reproduction=reproduction, trace=outcome.trace, output=outcome.output)  # fmt: skip
    return [finding], outcome


@cache
def _models(scratch: Path) -> Path:
    """Write the models once in each process."""
    folder = scratch / f"models-{os.getpid()}"
    shutil.rmtree(folder, ignore_errors=True)
    with silent():
        make_models(folder)
    return folder
