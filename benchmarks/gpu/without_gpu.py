"""PyTorch for CPUs, patched to generate the code of an H100. The code is never run.

All patches are here, each with its reason. They last as long as the process, so only programs that count import this
module, and before anything imports PyTorch.
"""

import ctypes
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from torch.library import Library

_FOLDER = Path(tempfile.mkdtemp(prefix="crosscut-count-"))

H100 = SimpleNamespace(
    name="NVIDIA H100 80GB HBM3", major=9, minor=0, multi_processor_count=132, regs_per_multiprocessor=65536,
    max_threads_per_multi_processor=2048, max_threads_per_block=1024, warp_size=32, total_memory=85_017_493_504,
    L2_cache_size=50 << 20, shared_memory_per_block=49_152, shared_memory_per_block_optin=232_448,
    shared_memory_per_multiprocessor=233_472, gcnArchName="",
)  # fmt: skip
"""Properties that PyTorch tells of an H100. Inductor chooses its kernels by them."""


class CodeMade(BaseException):
    """Generated code was called. It cannot run here."""


def reason_against() -> str:
    """Reason why this machine cannot generate the code. Empty if it can."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed (python -m pip install triton)"
    return "" if shutil.which(os.environ.get("CXX", "c++")) else "no C++ compiler was found"


def _load_guard() -> None:
    """Build the guard and load it before PyTorch, which looks for a device's hooks once, when it is imported."""
    assert "torch" not in sys.modules
    spec = importlib.util.find_spec("torch")
    assert spec is not None and spec.origin is not None
    torch_folder, library = Path(spec.origin).parent, _FOLDER / "guard.so"
    source = Path(__file__).with_name("cuda_guard.cpp")
    command = [os.environ.get("CXX", "c++"), "-shared", "-fPIC", "-std=c++20", f"-I{torch_folder}/include", source]
    subprocess.run([*command, "-o", library, f"-L{torch_folder}/lib", "-lc10", "-ltorch_cpu"], check=True)
    for path in (
        *torch_folder.glob("lib/libgomp*"),
        torch_folder / "lib/libc10.so",
        torch_folder / "lib/libtorch_cpu.so",
    ):
        ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    ctypes.CDLL(str(library))


if reason := reason_against():
    sys.exit(f"The code of a GPU cannot be generated: {reason}.")
os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(_FOLDER)  # a cache of other code would hide what is counted
_load_guard()


def _answer(value: object) -> Callable[..., object]:
    """Make a function that returns the value. Each patch needs its own: Dynamo has a table of functions."""
    return lambda *_given, **_named: value


def _answer_as_an_h100() -> None:
    """Answer PyTorch's questions about devices. The CPU's PyTorch raises an error for each."""
    import torch

    nothing = ("_lazy_init", "set_device", "synchronize", "set_rng_state")
    numbers = {"device_count": 1, "current_device": 0, "_exchange_device": 0, "_maybe_exchange_device": 0}
    figures = {"get_device_properties": H100, "get_device_capability": (9, 0), "get_device_name": H100.name}
    yes = {"is_available": True, "is_bf16_supported": True}
    state = {"get_rng_state": torch.zeros(16, dtype=torch.uint8)}
    for name, value in {**dict.fromkeys(nothing), **numbers, **figures, **yes, **state}.items():
        setattr(torch.cuda, name, _answer(value))
    torch.version.cuda = "13.0"
    # CUDA's part of PyTorch, which is not there
    for name in ("getCurrentRawStream", "getDevice", "exchangeDevice", "maybeExchangeDevice", "setDevice"):
        setattr(torch._C, f"_cuda_{name}", _answer(0))


def _generate_without_device() -> None:
    """Skip what Inductor does on a device while it compiles. `torch.cuda` must answer before Inductor is imported,
    which keeps its functions.
    """
    import torch._functorch.config as functorch
    import torch._inductor.config as inductor
    from torch._dynamo.device_interface import CudaInterface
    from torch._inductor.fx_passes import fuse_attention, misc_patterns, pad_mm
    from torch.utils import _triton

    _patch(CudaInterface.Worker, get_device_properties=H100, current_device=0)  # answers of worker processes
    _patch(_triton, has_triton=True, triton_hash_with_backend="0" * 64)  # both ask the driver
    # These patterns are traced from real tensors on the device. They replace attention that is written out, products of
    # odd sizes and random permutations, none of which a layer has.
    _patch(fuse_attention, _sfdp_init=None)
    _patch(pad_mm, _pad_mm_init=None)
    _patch(misc_patterns, _misc_patterns_init=None)
    _set(inductor, fx_graph_cache=False, compile_threads=1)
    # The forward pass never runs, so a backward pass that is compiled when it first runs would never be.
    _set(functorch, enable_autograd_cache=False, force_non_lazy_backward_lowering=True)


def _patch(owner: object, **answers: object) -> None:
    for name, value in answers.items():
        answer = _answer(value)
        setattr(owner, name, staticmethod(answer) if isinstance(owner, type) else answer)


def _set(owner: object, **values: object) -> None:
    for name, value in values.items():
        setattr(owner, name, value)


def _fold_constants() -> "Library":
    """Make the constants that Inductor folds on the CPU. It only reads their value. Return the registration, which ends
    with the object.
    """
    import torch

    def empty(size: list[int], *, dtype: "torch.dtype | None" = None, **_others: object) -> "Tensor":
        return torch.empty(size, dtype=dtype, device="cpu")

    library = torch.library.Library("aten", "IMPL")
    library.impl("empty.memory_format", empty, "CUDA")
    return library


def _attend_as_an_h100() -> None:
    """Attend with cuDNN, which PyTorch chooses on an H100. The choice is in CUDA's part of PyTorch."""
    import torch

    def attend(
        q: "Tensor", k: "Tensor", v: "Tensor", *, is_causal: bool, scale: float | None, **others: object
    ) -> "Tensor":
        assert not others.get("attn_mask"), "with a mask, PyTorch chooses another kernel"
        attention = torch.ops.aten._scaled_dot_product_cudnn_attention
        result: Tensor = attention(q, k, v, None, True, 0.0, is_causal, False, scale=scale)[0]
        return result

    torch.nn.functional.scaled_dot_product_attention = attend  # type: ignore[assignment]


def on_code(hear: Callable[[Any, str], None]) -> None:
    """Call `hear` with each graph that Inductor has lowered (`GraphLowering`) and with the code that it has generated.
    Calls of the code raise `CodeMade`.
    """
    from torch._inductor.graph import GraphLowering

    def call(_arguments: object) -> None:
        raise CodeMade

    def hear_code(graph: Any) -> SimpleNamespace:
        code, _ = graph.codegen()
        hear(graph, code.value)
        return SimpleNamespace(call=call, runner=None, __file__="")

    GraphLowering.compile_to_module = hear_code  # type: ignore[assignment, method-assign]


_answer_as_an_h100()
_generate_without_device()
_FOLDING = _fold_constants()
_attend_as_an_h100()
