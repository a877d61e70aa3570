"""Process of one entry: it imports the code that the entry names, measures, and sends the result back.

Processes are forked from a server that has imported PyTorch, never uses a device, and does not know Crosscut. So each
imports `crosscut` from the folder of its entry, and the programs that measure it from this checkout.
"""

import multiprocessing as mp
import os
import sys
import tempfile
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.gpu.plan import Entry

ROOT = Path(__file__).parents[2]
CACHE = Path(tempfile.gettempdir(), "crosscut-gpu-cache")
"""Folder of everything that is compiled. All processes share it, also those of a second call on the same machine."""
PRELOADED = ("torch", "torch._dynamo", "torch.distributed.fsdp", "torch.profiler")
"""Imports of the server. Inductor is not among them, because it may start helpers, which a fork would not have."""


@dataclass(frozen=True)
class Failure:
    """Answer of a process that has no result: the reason."""

    reason: str


def start_server(*, forks: bool = True) -> None:
    """Choose how processes start. Without `forks`, each imports everything anew, where an import uses the device."""
    # Before Python 3.14 the server gets the environment but not `sys.path`.
    known = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, known)])
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # finds GPUs without initializing CUDA
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(CACHE / "inductor")
    os.environ["TRITON_CACHE_DIR"] = str(CACHE / "triton")
    mp.set_forkserver_preload(list(PRELOADED))
    mp.set_start_method("forkserver" if forks else "spawn", force=True)


def in_process(entry: Entry | None, folder: Path, device: str, *, limit: float) -> Any:
    """Measure an entry with the code of a folder in a process of its own, and return the result or a `Failure`.
    Without an entry, the result describes the device.
    """
    context = mp.get_context()
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=answer, args=(entry, str(folder), device, there), daemon=False)
    try:
        process.start()
    except (OSError, EOFError) as error:
        return Failure(f"its process did not start ({type(error).__name__}: {error})")
    there.close()
    try:
        result = here.recv() if here.poll(limit) else Failure(f"did not end within {limit:.0f} s")
    except (OSError, EOFError):
        process.join(5)
        result = Failure(f"its process ended with status {process.exitcode}")
    process.join(5 if not isinstance(result, Failure) else 0.1)
    if process.is_alive():
        process.kill()
        process.join(10)
    return result


def answer(entry: Entry | None, folder: str, device: str, back: Connection) -> None:
    """Send the result of an entry, or a `Failure`, and end the process at once.

    An orderly exit would spend seconds on releasing the model and the helpers of the compiler.
    """
    try:
        with code_of(folder):
            from benchmarks.gpu.measuring.entries import describe, measure

            result = describe(device) if entry is None else measure(entry, device)
    except Exception as error:  # of any kind, so that the other entries go on
        if entry is not None:
            traceback.print_exc()
        first_line = (str(error).strip() or type(error).__name__).splitlines()[0][:300]
        result = Failure(f"{type(error).__name__}: {first_line}")
    back.send(result)
    back.close()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(0)


@contextmanager
def code_of(folder: str) -> Iterator[None]:
    """Import `crosscut` from this folder inside the context. Raises `ImportError` if it was imported from another."""
    sys.path.insert(0, folder)
    import crosscut

    if Path(folder).resolve() not in Path(crosscut.__file__).resolve().parents:
        raise ImportError(f"`crosscut` must come from {folder}, but comes from {crosscut.__file__}")
    yield
    sys.path.remove(folder)
